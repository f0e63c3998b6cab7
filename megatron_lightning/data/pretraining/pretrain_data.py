"""Data of a pre-training run: indexed files served as samples of a fixed length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any

from megatron_lightning.data.flat_options import takes
from megatron_lightning.data.indexed.indexed_files import IndexedDataset
from megatron_lightning.data.pretraining.fim import FillInTheMiddle
from megatron_lightning.data.pretraining.gpt_samples import (
    GPTDataset,
    GPTDatasetConfig,
    IndexSplit,
    plan_part,
)
from megatron_lightning.data.pretraining.indexed_data import IndexedData
from megatron_lightning.data.pretraining.indexed_options import IndexedOptions
from megatron_lightning.data.pretraining.mock import MockGPTDataset
from megatron_lightning.data.pretraining.run_options import NamedTokenizer
from megatron_lightning.data.text.tokenizers import TokenizerType
from megatron_lightning.errors import ConfigError

_SPLIT = "969,30,1"


@dataclass(frozen=True)
class PretrainOptions(IndexedOptions):
    """Options of the data of pre-training.

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
        seed: Seed of the order of documents and samples.
        vocab_size: Size of the vocabulary. A larger id in the data is an error. Default: the
            tokenizer's or model's size.
        tokenizer_model: Tokenizer of the data, for vocabulary, padding and end-of-document ids.
        tokenizer_type: sentencepiece, huggingface, json, bytes, null or class_path.
        eod_mask_loss: Whether positions of an end of document have no loss.
        reset_position_ids: Whether positions restart at 0 after every end of document.
        reset_attention_mask: Whether tokens attend only to tokens of the same document. An end of
            document belongs to the ended document. The batch numbers the documents of each row, and
            the model compares the numbers: there is no dense mask.
        fim: Rearrangement of documents for fill-in-the-middle. Needs ``tokenizer_model``.
        mock: Whether samples are random, without any data, to time a layout. Without
            ``num_train_samples`` there are a million samples.

    Raises:
        ConfigError: If a value, or the combination, cannot work.
    """

    data_prefix: str | list[str] | list[tuple[float, str]] | dict[str, Any] | None = None
    sequence_length: int = 0
    batch_size: int | None = None
    _: KW_ONLY
    tokenizer_model: str | None = None
    tokenizer_type: TokenizerType = "sentencepiece"
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    fim: FillInTheMiddle | None = None
    mock: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mock == (self.data_prefix is not None):
            raise ConfigError(
                f"data_prefix is {self.data_prefix!r} and mock is {self.mock}: the tokens come "
                "from files, or are random. Set one of the two."
            )
        if self.mock and self.fim is not None:
            raise ConfigError(
                "fim rearranges documents, and the tokens of mock=True are random. Leave one of "
                "the two out."
            )
        if self.mock and self.on_changed_data in {"continue", "restart"}:
            raise ConfigError(
                f"on_changed_data={self.on_changed_data!r} goes on with data sets that have "
                "changed, and mock=True reads none. Leave one of the two out."
            )


class PretrainData(IndexedData):
    """Samples of ``PretrainDataModule``, read without a Trainer."""

    sequence_dims: Mapping[str, int] = MappingProxyType(
        {"tokens": 1, "labels": 1, "loss_mask": 1, "position_ids": 1, "document_ids": 1}
    )
    """Sequence dim of each batch entry."""

    @takes(PretrainOptions)
    def __init__(self, options: PretrainOptions) -> None:
        self.mock = options.mock
        self._fim = options.fim
        tokenizer = NamedTokenizer.load(options.tokenizer_model, options.tokenizer_type)
        if options.fim is not None and tokenizer is None:
            raise ConfigError(
                "fim cuts texts at characters, and tokenizer_model is left out. Set it to the "
                "tokenizer of the data."
            )
        sizes = options.sizes(options.batch_size)
        config = GPTDatasetConfig(
            sequence_length=options.sequence_length,
            random_seed=options.seed,
            split=options.split or _SPLIT,
            tokenizer=None if tokenizer is None else tokenizer.tokenizer,
            vocab_size=options.vocab_size,
            cache_dir=options.cache_dir,
            cache_bytes=options.cache_bytes,
            eod_mask_loss=options.eod_mask_loss,
            reset_position_ids=options.reset_position_ids,
            reset_attention_mask=options.reset_attention_mask,
            fim=options.fim,
        )
        prefix = options.data_prefix or "mock"
        super().__init__(config, prefix, options, sizes=sizes, tokenizer=tokenizer)

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
        config = self.config
        size = config.num_ids or self._model_vocabulary()
        if size is None:
            raise ConfigError(
                "mock=True draws tokens below the size of the vocabulary, and neither the data nor "
                "the model's config says it. Set vocab_size."
            )
        part = ("train", "valid", "test").index(name)
        count = count or (10**6 if name == "train" else 10**3)
        return MockGPTDataset(count, config.sequence_length, size, 3 * config.random_seed + part)
