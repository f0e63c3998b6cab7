"""LightningDataModule of a pre-training run: an indexed dataset served as fixed-length samples."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron_lightning.data.indexed.indexed_files import IndexedDataset
from megatron_lightning.data.order.batch_size import BatchSizeSchedule
from megatron_lightning.data.order.resume_order import OnChangedData
from megatron_lightning.data.pretraining.fim import FillInTheMiddle
from megatron_lightning.data.pretraining.gpt_samples import (
    GPTDataset,
    GPTDatasetConfig,
    IndexSplit,
    plan_part,
)
from megatron_lightning.data.pretraining.mock import MockGPTDataset
from megatron_lightning.data.text.tokenizers import TokenizerType
from megatron_lightning.errors import ConfigError
from megatron_lightning.modules.indexed_data import IndexedDataModule
from megatron_lightning.modules.run_options import NamedTokenizer, RunSizes

_SPLIT = "969,30,1"


class PretrainDataModule(IndexedDataModule):
    """Batches ``{"tokens": [b, s], "labels": [b, s], "loss_mask": [b, s]}`` from files of
    ``megatron-lightning preprocess``.

    The datasets are shuffled already and read in order, so that the number of consumed samples is
    the position in the data. Labels are already shifted. With ``reset_attention_mask`` a batch also
    has ``document_ids`` [b, s]. With ``reset_attention_mask`` or ``reset_position_ids`` a batch has
    ``position_ids`` [b, s].

    Args:
        data_prefix: Path of the ``.bin`` and ``.idx`` files without their suffixes. Several data
            sets: a list of paths, mixed by size, or a list of pairs of a weight and a path:
            ``[[0.3, a], [0.7, b]]``. Separate data: ``{train: …, validation: …, test: …}`` with a
            path or list for each part, reading all documents. Validation may have several sets by
            name, ``{code: c, web: w}``, with losses logged as ``val_loss/code`` beside
            ``val_loss``. A JSON or YAML file may hold any of these forms.
        sequence_length: Tokens of a sample (s).
        batch_size: Samples of a batch on a data-parallel rank (b). Leave out with
            ``global_batch_size``.
        global_batch_size: Samples of an optimizer step over all data-parallel ranks, for any number
            of ranks. Replaces ``batch_size``.
        batch_size_schedule: Growing global batch sizes of training. Replaces ``batch_size``.
        split: Weights of train, validation and test, splitting the documents in file order. A part
            of weight 0 has no loader in a fit, and is an error elsewhere. ``predict`` reads the
            test part. None: 969, 30 and 1.
        seed: Seed of the order of documents and samples.
        num_train_samples: Training samples of the full run, over as many epochs as needed. Default:
            one epoch, repeated by Lightning in the same order.
        num_val_samples: Validation samples. Default: all validation samples once.
        num_test_samples: Test samples. Default: all test samples once.
        vocab_size: Size of the vocabulary. A larger id in the data is an error. Default: the
            tokenizer's or model's size.
        tokenizer_model: Tokenizer of the data, for vocabulary, padding and end-of-document ids.
        tokenizer_type: sentencepiece, huggingface, json, bytes, null or class_path.
        eod_mask_loss: Whether positions of an end of document have no loss.
        reset_position_ids: Whether positions restart at 0 after every end of document.
        reset_attention_mask: Whether tokens attend only to tokens of the same document. An end of
            document belongs to the ended document. The batch numbers the documents of each row, and
            the model compares the numbers: there is no dense mask.
        num_workers: Worker processes of each loader on each rank. 0 reads in the training process.
        reading_thread: Whether a thread of the training process reads the next two batches while
            a step waits for its device. Replaces ``num_workers``, and is faster for small samples.
        cache_dir: Folder of the index cache. Default: ``{data_prefix}/cache``. Without a shared
            file system each node builds a local cache. Data at a URL need the folder: blocks that
            are read are kept there.
        cache_bytes: Size of the blocks kept of data at a URL. Default: no limit.
        skip_samples: Ranges [first, end] of ``consumed_samples`` skipped by training, such as the
            samples of a loss spike. Skipped samples count as consumed. A checkpoint keeps the
            ranges.
        fim: Rearrangement of documents for fill-in-the-middle. Needs ``tokenizer_model``.
        mock: Whether samples are random, without any data, to time a layout. Without
            ``num_train_samples`` there are a million samples.
        on_changed_data: Reaction of a resumed run if the order of training samples has changed
            since the checkpoint. ``refuse`` raises an error. ``continue``: every data set resumes
            in its own order at its last sample, new data sets begin at 0, and a table lists the
            samples read twice. ``restart``: all data sets begin again. ``reorder`` reads on at the
            same position of the new order with a warning.

    Raises:
        ConfigError: If a value, or the combination, cannot work.
        DataError: If the data or the tokenizer cannot be read, on ``prepare_data`` and ``setup``.
    """

    sequence_dims: Mapping[str, int] = MappingProxyType(
        {"tokens": 1, "labels": 1, "loss_mask": 1, "position_ids": 1, "document_ids": 1}
    )
    """Sequence dim of each batch entry."""

    def __init__(
        self,
        data_prefix: str | list[str] | list[tuple[float, str]] | dict[str, Any] | None = None,
        sequence_length: int = 0,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        batch_size_schedule: BatchSizeSchedule | None = None,
        split: str | None = None,
        seed: int = 1234,
        num_train_samples: int | None = None,
        num_val_samples: int | None = None,
        num_test_samples: int | None = None,
        vocab_size: int | None = None,
        tokenizer_model: str | None = None,
        tokenizer_type: TokenizerType = "sentencepiece",
        eod_mask_loss: bool = False,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        num_workers: int = 0,
        reading_thread: bool = False,
        cache_dir: str | None = None,
        cache_bytes: int | None = None,
        skip_samples: list[list[int]] | None = None,
        fim: FillInTheMiddle | None = None,
        mock: bool = False,
        on_changed_data: OnChangedData = "refuse",
    ) -> None:
        if mock == (data_prefix is not None):
            raise ConfigError(
                f"data_prefix is {data_prefix!r} and mock is {mock}: the tokens come from files, "
                "or are random. Set one of the two."
            )
        if mock and fim is not None:
            raise ConfigError(
                "fim rearranges documents, and the tokens of mock=True are random. Leave one of "
                "the two out."
            )
        if mock and on_changed_data in {"continue", "restart"}:
            raise ConfigError(
                f"on_changed_data={on_changed_data!r} goes on with data sets that have changed, "
                "and mock=True reads none. Leave one of the two out."
            )
        self.mock = mock
        self._fim = fim
        named_tokenizer = NamedTokenizer.load(tokenizer_model, tokenizer_type)
        if fim is not None and named_tokenizer is None:
            raise ConfigError(
                "fim cuts texts at characters, and tokenizer_model is left out. Set it to the "
                "tokenizer of the data."
            )
        sizes = RunSizes(
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            batch_size_schedule=batch_size_schedule,
            num_train_samples=num_train_samples,
            num_val_samples=num_val_samples,
            num_test_samples=num_test_samples,
        )
        config = GPTDatasetConfig(
            sequence_length=sequence_length,
            random_seed=seed,
            split=split or _SPLIT,
            tokenizer=None if named_tokenizer is None else named_tokenizer.tokenizer,
            vocab_size=vocab_size,
            cache_dir=cache_dir,
            cache_bytes=cache_bytes,
            eod_mask_loss=eod_mask_loss,
            reset_position_ids=reset_position_ids,
            reset_attention_mask=reset_attention_mask,
            fim=fim,
        )
        super().__init__(
            config,
            data_prefix or "mock",
            split=split,
            sizes=sizes,
            tokenizer=named_tokenizer,
            num_workers=num_workers,
            reading_thread=reading_thread,
            skip_samples=skip_samples,
            on_changed_data=on_changed_data,
        )

    def make_dataset(
        self, prefix: str, config: Any, name: IndexSplit, num_samples: int | None
    ) -> Any:
        """Return the data set of a prefix."""
        return GPTDataset(prefix, config, name, num_samples)

    def check_part(
        self, indexed: IndexedDataset, config: Any, name: IndexSplit, num_samples: int | None
    ) -> None:
        """Check that a part of the split has tokens enough."""
        plan_part(indexed, config, name, num_samples)

    def check_files(self, stage: str) -> None:
        """Check that the data suffice for ``stage``, before the strategy starts a process."""
        if self.mock:
            self._parts(stage)
        else:
            super().check_files(stage)

    def train_prefixes(self) -> list[str]:
        """Return the prefixes of the training data. None for random samples."""
        return [] if self.mock else super().train_prefixes()

    def order_settings(self) -> Mapping[str, Any]:
        """Return the settings of fill-in-the-middle."""
        return {"fim": None if self._fim is None else self._fim.settings}

    def _positions(self, consumed: int | None) -> dict[str, Any]:
        return {} if self.mock else super()._positions(consumed)

    def _order(self) -> dict[str, Any]:
        if not self.mock:
            return super()._order()
        names = ("sequence_length", "random_seed")
        return {"mock": True, **{name: getattr(self.config, name) for name in names}}

    def _open(self, stage: str) -> dict[IndexSplit, Any]:
        if not self.mock:
            return super()._open(stage)
        return {name: self._mocked(name, count) for name, count in self._parts(stage).items()}

    def _mocked(self, name: IndexSplit, count: int | None) -> MockGPTDataset:
        config, trainer = self.config, self.trainer
        module = self._module if trainer is None else trainer.lightning_module
        model = getattr(module, "config", None)
        size = config.num_ids or getattr(model, "vocab_size", None)
        if not isinstance(size, int):
            raise ConfigError(
                "mock=True draws tokens below the size of the vocabulary, and neither the data nor "
                "the model's config says it. Set vocab_size."
            )
        part = ("train", "valid", "test").index(name)
        count = count or (10**6 if name == "train" else 10**3)
        return MockGPTDataset(count, config.sequence_length, size, 3 * config.random_seed + part)
