"""LightningDataModule of masked samples for encoders and encoder-decoders."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

from megatron_lightning.data.indexed.indexed_files import IndexedDataset
from megatron_lightning.data.masked.masked_config import (
    BertDatasetConfig,
    MaskedDatasetConfig,
    T5DatasetConfig,
)
from megatron_lightning.data.masked.masked_samples import (
    BertDataset,
    MaskedDataset,
    T5Dataset,
    documents_of,
)
from megatron_lightning.data.order.batch_size import BatchSizeSchedule
from megatron_lightning.data.order.resume_order import OnChangedData
from megatron_lightning.data.pretraining.gpt_samples import IndexSplit
from megatron_lightning.data.text.tokenizers import TokenizerType
from megatron_lightning.errors import ConfigError
from megatron_lightning.modules.indexed_data import IndexedDataModule
from megatron_lightning.modules.run_options import NamedTokenizer, RunSizes

MaskedKind = Literal["bert", "t5"]
_KINDS: Mapping[str, tuple[type[MaskedDataset], type[MaskedDatasetConfig]]] = MappingProxyType(
    {"bert": (BertDataset, BertDatasetConfig), "t5": (T5Dataset, T5DatasetConfig)}
)


class MaskedDataModule(IndexedDataModule):
    """Batches of :class:`BertDataset` or :class:`T5Dataset` from files of ``megatron-lightning
    preprocess --split-sentences``.

    Blends, separate parts, resumes and skipped samples are as in :class:`PretrainDataModule`.

    Args:
        data_prefix: Path of the ``.bin`` and ``.idx`` files without their suffixes, or a blend, or
            ``{train: …, validation: …, test: …}``. See :class:`PretrainDataModule`.
        kind: "bert": pairs of segments with masked words. "t5": spans replaced by sentinels.
        sequence_length: Tokens of a sample (s), of the encoder with "t5".
        batch_size: Samples of a batch on a data-parallel rank (b). Leave out with
            ``global_batch_size``.
        tokenizer_model: Tokenizer of the data, with special tokens and words.
        tokenizer_type: huggingface, json, sentencepiece or class_path.
        sequence_length_decoder: Tokens of the decoder's input. Only with "t5".
        classification_head: Whether samples are pairs, swapped with probability 0.5. Only with
            "bert". Default: yes.
        masking_probability: Fraction of masked tokens.
        short_sequence_probability: Probability of a sample with a random shorter target length.
        masking_max_ngram: Words of a masked n-gram at most. Default: 3 for "bert", 10 for "t5".
        masking_do_full_word: Whether all pieces of a word are masked together.
        masking_do_permutation: Whether as many further tokens are permuted, and predicted as well.
            Permuted tokens are not Megatron's. See :class:`MaskedDatasetConfig`.
        masking_use_longer_ngrams: Whether longer n-grams are more likely.
        masking_use_geometric_distribution: Whether lengths of n-grams are geometric. Default: with
            "t5" alone.
        global_batch_size: Samples of an optimizer step over all data-parallel ranks. Replaces
            ``batch_size``.
        batch_size_schedule: Growing global batch sizes of training. Replaces ``batch_size``.
        split: Weights of train, validation and test, splitting the documents in file order. None:
            969, 30 and 1.
        seed: Seed of target lengths, order and masks.
        num_train_samples: Training samples of the full run, over as many epochs as needed. Default:
            one epoch, repeated by Lightning with the same masks.
        num_val_samples: Validation samples. Default: one epoch.
        num_test_samples: Test samples. Default: one epoch.
        vocab_size: Size of the model's vocabulary. A larger id in the data is an error. Default:
            the tokenizer's size.
        num_workers: Worker processes of each loader on each rank. 0 reads in the training process.
        reading_thread: Whether a thread of the training process reads the next two batches.
            Replaces ``num_workers``.
        cache_dir: Folder of the index cache. Default: ``{data_prefix}/cache``.
        cache_bytes: Size of the blocks kept of data at a URL. Default: no limit.
        skip_samples: Ranges [first, end] of ``consumed_samples`` skipped by training.
        on_changed_data: Reaction of a resumed run to another order. See
            :class:`PretrainDataModule`.

    Raises:
        ConfigError: If a value, or the combination, cannot work.
        DataError: If the data or the tokenizer cannot be read, on ``prepare_data`` and ``setup``.
    """

    def __init__(
        self,
        data_prefix: str | list[str] | list[tuple[float, str]] | dict[str, Any],
        kind: MaskedKind,
        sequence_length: int,
        batch_size: int | None = None,
        *,
        tokenizer_model: str,
        tokenizer_type: TokenizerType = "huggingface",
        sequence_length_decoder: int | None = None,
        classification_head: bool | None = None,
        masking_probability: float = 0.15,
        short_sequence_probability: float = 0.1,
        masking_max_ngram: int | None = None,
        masking_do_full_word: bool = True,
        masking_do_permutation: bool = False,
        masking_use_longer_ngrams: bool = False,
        masking_use_geometric_distribution: bool | None = None,
        global_batch_size: int | None = None,
        batch_size_schedule: BatchSizeSchedule | None = None,
        split: str | None = None,
        seed: int = 1234,
        num_train_samples: int | None = None,
        num_val_samples: int | None = None,
        num_test_samples: int | None = None,
        vocab_size: int | None = None,
        num_workers: int = 0,
        reading_thread: bool = False,
        cache_dir: str | None = None,
        cache_bytes: int | None = None,
        skip_samples: list[list[int]] | None = None,
        on_changed_data: OnChangedData = "refuse",
    ) -> None:
        if kind not in _KINDS:
            raise ConfigError(f"kind={kind!r}; must be one of {', '.join(get_args(MaskedKind))}.")
        self.kind = kind
        of_kind = {
            "sequence_length_decoder": ("t5", sequence_length_decoder),
            "classification_head": ("bert", classification_head),
        }
        for name, (owner, value) in of_kind.items():
            if value is not None and kind != owner:
                raise ConfigError(
                    f'{name}={value} beside kind="{kind}": it is an option of kind="{owner}". '
                    "Leave it out."
                )
        if kind == "t5" and sequence_length_decoder is None:
            raise ConfigError(
                'kind="t5" has inputs of a decoder, and sequence_length_decoder is left out. Set '
                "it, such as to a quarter of sequence_length."
            )
        optional: dict[str, Any] = {
            **{name: value for name, (_, value) in of_kind.items()},
            "masking_max_ngram": masking_max_ngram,
            "masking_use_geometric_distribution": masking_use_geometric_distribution,
            "split": split,
        }
        named_tokenizer = NamedTokenizer.load(tokenizer_model, tokenizer_type)
        dataset, config = _KINDS[kind]
        self._dataset_class = dataset
        super().__init__(
            config(
                sequence_length=sequence_length,
                tokenizer=None if named_tokenizer is None else named_tokenizer.tokenizer,
                random_seed=seed,
                vocab_size=vocab_size,
                cache_dir=cache_dir,
                cache_bytes=cache_bytes,
                masking_probability=masking_probability,
                short_sequence_probability=short_sequence_probability,
                masking_do_full_word=masking_do_full_word,
                masking_do_permutation=masking_do_permutation,
                masking_use_longer_ngrams=masking_use_longer_ngrams,
                **{name: value for name, value in optional.items() if value is not None},
            ),
            data_prefix,
            split=split,
            sizes=RunSizes(
                batch_size=batch_size,
                global_batch_size=global_batch_size,
                batch_size_schedule=batch_size_schedule,
                num_train_samples=num_train_samples,
                num_val_samples=num_val_samples,
                num_test_samples=num_test_samples,
            ),
            tokenizer=named_tokenizer,
            num_workers=num_workers,
            reading_thread=reading_thread,
            skip_samples=skip_samples,
            on_changed_data=on_changed_data,
        )

    def make_dataset(
        self, prefix: str, config: Any, name: IndexSplit, num_samples: int | None
    ) -> MaskedDataset:
        """Return the data set of a prefix."""
        return self._dataset_class(prefix, config, name, num_samples)

    def check_part(
        self, indexed: IndexedDataset, config: Any, name: IndexSplit, num_samples: int | None
    ) -> None:
        """Check that a document of a part of the split gives a sample."""
        documents_of(indexed, config, name)

    def order_settings(self) -> Mapping[str, Any]:
        """Return the settings of samples: kind and masking."""
        return {"kind": self.kind, **self.config.order}
