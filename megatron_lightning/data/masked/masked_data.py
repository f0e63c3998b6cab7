"""Data of masked samples for encoders and encoder-decoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from megatron_lightning.data.flat_options import takes
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
from megatron_lightning.data.pretraining.gpt_samples import IndexSplit
from megatron_lightning.data.pretraining.indexed_data import IndexedData
from megatron_lightning.data.pretraining.indexed_options import IndexedOptions
from megatron_lightning.data.pretraining.run_options import NamedTokenizer
from megatron_lightning.data.text.tokenizers import TokenizerType
from megatron_lightning.errors import ConfigError

MaskedKind = Literal["bert", "t5"]
_KINDS: Mapping[str, tuple[type[MaskedDataset], type[MaskedDatasetConfig]]] = MappingProxyType(
    {"bert": (BertDataset, BertDatasetConfig), "t5": (T5Dataset, T5DatasetConfig)}
)


@dataclass(frozen=True)
class MaskedOptions(IndexedOptions):
    """Options of the data of masked samples.

    Args:
        data_prefix: Path of the ``.bin`` and ``.idx`` files without their suffixes, or a blend, or
            ``{train: …, validation: …, test: …}``. See :class:`PretrainOptions`.
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
        seed: Seed of target lengths, order and masks.
        vocab_size: Size of the model's vocabulary. A larger id in the data is an error. Default:
            the tokenizer's size.

    Raises:
        ConfigError: If a value, or the combination, cannot work.
    """

    data_prefix: str | list[str] | list[tuple[float, str]] | dict[str, Any]
    kind: MaskedKind
    sequence_length: int
    batch_size: int | None = None
    _: KW_ONLY
    tokenizer_model: str
    tokenizer_type: TokenizerType = "huggingface"
    sequence_length_decoder: int | None = None
    classification_head: bool | None = None
    masking_probability: float = 0.15
    short_sequence_probability: float = 0.1
    masking_max_ngram: int | None = None
    masking_do_full_word: bool = True
    masking_do_permutation: bool = False
    masking_use_longer_ngrams: bool = False
    masking_use_geometric_distribution: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = self.kind
        if kind not in _KINDS:
            raise ConfigError(f"kind={kind!r}; must be one of {', '.join(get_args(MaskedKind))}.")
        for name, owner in (("sequence_length_decoder", "t5"), ("classification_head", "bert")):
            value = getattr(self, name)
            if value is not None and kind != owner:
                raise ConfigError(
                    f'{name}={value} beside kind="{kind}": it is an option of kind="{owner}". '
                    "Leave it out."
                )
        if kind == "t5" and self.sequence_length_decoder is None:
            raise ConfigError(
                'kind="t5" has inputs of a decoder, and sequence_length_decoder is left out. Set '
                "it, such as to a quarter of sequence_length."
            )

    @property
    def with_defaults_of_kind(self) -> Mapping[str, Any]:
        """Options that are set, of those with a default of the kind."""
        names = (
            "sequence_length_decoder",
            "classification_head",
            "masking_max_ngram",
            "masking_use_geometric_distribution",
            "split",
        )
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


class MaskedData(IndexedData):
    """Samples of ``MaskedDataModule``, read without a Trainer."""

    @takes(MaskedOptions)
    def __init__(self, options: MaskedOptions) -> None:
        self.kind = options.kind
        tokenizer = NamedTokenizer.load(options.tokenizer_model, options.tokenizer_type)
        self._dataset_class, config_class = _KINDS[options.kind]
        config = config_class(
            sequence_length=options.sequence_length,
            tokenizer=None if tokenizer is None else tokenizer.tokenizer,
            random_seed=options.seed,
            vocab_size=options.vocab_size,
            cache_dir=options.cache_dir,
            cache_bytes=options.cache_bytes,
            masking_probability=options.masking_probability,
            short_sequence_probability=options.short_sequence_probability,
            masking_do_full_word=options.masking_do_full_word,
            masking_do_permutation=options.masking_do_permutation,
            masking_use_longer_ngrams=options.masking_use_longer_ngrams,
            **options.with_defaults_of_kind,
        )
        sizes = options.sizes(options.batch_size)
        super().__init__(config, options.data_prefix, options, sizes=sizes, tokenizer=tokenizer)

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
