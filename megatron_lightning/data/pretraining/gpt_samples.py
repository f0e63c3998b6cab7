"""Fixed-length samples for causal language models, with the sample order and cache of Megatron's
GPTDataset.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from megatron_lightning.data.indexed.index_check import check_lengths
from megatron_lightning.data.indexed.indexed_files import IndexedDataset
from megatron_lightning.data.indexed.read_ahead import Part, ReadAhead
from megatron_lightning.data.indexed.remote import BlockCache
from megatron_lightning.data.pretraining.fim import FillInTheMiddle
from megatron_lightning.data.pretraining.gpt_index import (
    EpochPlan,
    SampleIndices,
    build_indices,
    plan_epochs,
    split_matrix,
    split_sequences,
)
from megatron_lightning.data.pretraining.index_cache import Array, IndexCache, digest_of
from megatron_lightning.data.text.tokenizer_kinds import NO_PAD
from megatron_lightning.data.text.tokenizers import Tokenizer
from megatron_lightning.errors import ConfigError, DataError

IndexSplit = Literal["train", "valid", "test"]
_SPLITS: tuple[IndexSplit, ...] = ("train", "valid", "test")
_ARRAYS = ("document_index", "sample_index", "shuffle_index")


@dataclass(frozen=True, kw_only=True)
class GPTDatasetConfig:
    """Options of all splits of a dataset.

    Raises:
        ConfigError: If a value, or the combination, cannot work.
    """

    sequence_length: int
    """Tokens of a sample."""
    random_seed: int = 1234
    """Seed of the order of documents and samples."""
    split: str = "969,30,1"
    """Weights of train, validation and test, splitting the documents in file order."""
    tokenizer: Tokenizer | None = None
    """Tokenizer of the data, for padding and end-of-document ids. Part of the cache's name."""
    vocab_size: int | None = None
    """Size of the model's vocabulary. A larger id in the data is an error. None: the tokenizer's
    size, else unchecked."""
    cache_dir: str | None = None
    """Folder of the index cache. None: ``{data_prefix}/cache/GPTDataset_indices``."""
    cache_bytes: int | None = None
    """Size of the blocks kept in ``cache_dir`` of files at a URL. None: without a limit."""
    eod_mask_loss: bool = False
    """Whether positions of an end of document have no loss."""
    reset_position_ids: bool = False
    """Whether positions restart at 0 after every end of document."""
    reset_attention_mask: bool = False
    """Whether tokens attend only to tokens of the same document."""
    add_extra_token_to_sequence: bool = True
    """Whether a sample reads an extra token as the label of the last position. Else the last
    position has no loss."""
    fim: FillInTheMiddle | None = None
    """Rearrangement of documents, drawn from seed and sample. None: documents stay."""
    drop_last_partial_validation_sequence: bool = True
    """Whether validation drops the last tokens if a sample would be incomplete. Else the sample is
    padded."""

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise ConfigError(
                f"sequence_length={self.sequence_length}: must be a positive integer; set it to 1 "
                "or more"
            )
        for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
            if getattr(self, name) and self.tokenizer is None:
                raise ConfigError(
                    f"{name}=True needs the end-of-document id; set tokenizer_model, or {name} to "
                    "False"
                )
        if not 0 <= self.random_seed < 2**32:
            raise ConfigError(
                f"seed={self.random_seed} is not a seed of NumPy's generator; set it to 0 or more, "
                "below 2**32"
            )
        split_matrix(self.split)
        if self.fim is not None and self.tokenizer is not None:
            object.__setattr__(self, "fim", self.fim.of(self.tokenizer))
        if self.fim is not None and self.num_ids is not None:
            self.fim.check_vocabulary(self.num_ids)

    @property
    def extra_tokens(self) -> int:
        """Tokens a sample reads beyond ``sequence_length``."""
        return int(self.add_extra_token_to_sequence)

    @property
    def block_cache(self) -> BlockCache | None:
        """Folder of the blocks of files at a URL. None: ``cache_dir`` is not set."""
        return None if self.cache_dir is None else BlockCache(self.cache_dir, self.cache_bytes)

    @property
    def num_ids(self) -> int | None:
        """Size of the vocabulary. None: unknown."""
        return (
            self.tokenizer.vocab_size
            if self.vocab_size is None and self.tokenizer is not None
            else self.vocab_size
        )


def plan_part(
    indexed: IndexedDataset,
    config: GPTDatasetConfig,
    index_split: IndexSplit,
    num_samples: int | None,
) -> tuple[range, EpochPlan]:
    """Return the sequences [D] of a part of the split, and the epochs. Reads only the sequences'
    lengths.

    Raises:
        ConfigError: If the part has no weight.
        DataError: If the part has too few tokens.
    """
    bounds = split_matrix(config.split)[_SPLITS.index(index_split)]
    if bounds is None:
        raise ConfigError(
            f"split={config.split!r}: the {index_split} part has no weight; set it above 0"
        )
    sequences, extra = split_sequences(bounds, len(indexed)), config.extra_tokens
    # Only lengths are read: this check also runs before processes start.
    check_lengths(indexed, sequences.start, sequences.stop)
    lengths = indexed.sequence_lengths[sequences.start : sequences.stop]
    num_tokens = int(lengths.sum(dtype=np.int64))
    if num_tokens == 0:
        raise DataError(
            f"{indexed.prefix}: the {index_split} part of split={config.split!r} gets "
            f"{len(sequences)} of {len(indexed)} documents and no token; give it a larger weight, "
            "or 0 to go without it"
        )
    plan = plan_epochs(
        num_tokens, num_samples, config.sequence_length, extra, _drops_last(config, index_split)
    )
    if plan.num_samples == 0:
        raise DataError(
            f"{indexed.prefix}: the {index_split} part of split={config.split!r} has {num_tokens} "
            f"tokens, but a sample takes {config.sequence_length + extra}; set a smaller "
            "sequence_length, a larger weight, or num_samples to read it repeatedly"
        )
    return sequences, plan


def _drops_last(config: GPTDatasetConfig, index_split: IndexSplit) -> bool:
    return index_split != "valid" or config.drop_last_partial_validation_sequence


class GPTDataset(Dataset[dict[str, torch.Tensor]]):
    """A split of an indexed dataset as samples
    ``{"tokens": int64 [s], "labels": int64 [s], "loss_mask": float32 [s]}``.

    With ``reset_attention_mask`` a sample also has ``document_ids`` int64 [s], the numbers 0, 1, …
    of the documents. An end of document belongs to the ended document. With
    ``reset_attention_mask`` or ``reset_position_ids`` a sample has ``position_ids`` int64 [s].

    Labels are already shifted: ``labels[i]`` follows ``tokens[i]``. The order is shuffled once,
    here, so that the position in the data is a single number. The index arrays are cached under
    Megatron's names and shared by all processes through the page cache. Several processes or nodes
    may build the arrays at once.

    Args:
        data_prefix: Path of the ``.bin`` and ``.idx`` files without their suffixes.
        config: Options of all splits.
        index_split: Part of the documents to serve.
        num_samples: Number of samples, over as many epochs as needed. None: one epoch.

    Raises:
        DataError: If a file is missing or damaged, or the split has too few tokens.
        ConfigError: If the split has no weight.
    """

    def __init__(
        self,
        data_prefix: str,
        config: GPTDatasetConfig,
        index_split: IndexSplit = "train",
        num_samples: int | None = None,
    ) -> None:
        self.config = config
        self.index_split = index_split
        self.num_samples = num_samples
        self.indexed = IndexedDataset(data_prefix, config.block_cache)
        tokenizer = config.tokenizer
        self._pad = NO_PAD if tokenizer is None or tokenizer.pad == tokenizer.eod else tokenizer.pad
        self.indices = self._load_or_build()
        self._read_ahead = ReadAhead(self.indexed)

    @property
    def unique_description(self) -> str:
        """All inputs to the indices, in Megatron's format. The md5 of this text names the cache
        files.
        """
        config = self.config
        fields: dict[str, object] = {
            "class": type(self).__name__,
            "dataset_path": self.indexed.prefix,
            "num_samples": self.num_samples,
            "index_split": self.index_split,
            "random_seed": config.random_seed,
            "sequence_length": config.sequence_length,
            "split": config.split,
            "split_matrix": split_matrix(config.split),
            "tokenizer": None
            if config.tokenizer is None
            else dict(config.tokenizer.unique_identifiers),
        }
        # Megatron omits these fields and would serve the cache of another setting. With the
        # defaults the names are Megatron's.
        if not config.add_extra_token_to_sequence:
            fields["add_extra_token_to_sequence"] = False
        if not _drops_last(config, self.index_split):
            fields["drop_last_partial_validation_sequence"] = False
        return json.dumps(fields, indent=4)

    @property
    def unique_description_hash(self) -> str:
        """Md5 of :attr:`unique_description` in hexadecimal."""
        return digest_of(self.unique_description)

    def _load_or_build(self) -> SampleIndices:
        config, extra = self.config, self.config.extra_tokens
        sequences, plan = plan_part(self.indexed, config, self.index_split, self.num_samples)
        shapes = [
            (plan.num_epochs * len(sequences),),
            (plan.num_samples + 1, 2),
            (plan.num_samples,),
        ]

        def build() -> dict[str, Array]:
            lengths = self.indexed.sequence_lengths
            sizes = {
                "sequence_length": config.sequence_length,
                "extra": extra,
                "seed": config.random_seed,
            }
            indices = build_indices(lengths, sequences, plan, **sizes)
            return {name: getattr(indices, name) for name in _ARRAYS}

        kind = type(self).__name__
        cache = IndexCache(
            config.cache_dir or f"{self.indexed.prefix}/cache/{kind}_indices",
            f"{self.unique_description_hash}-{kind}-{self.index_split}",
            self.unique_description,
            self.indexed.index_file.stat().st_mtime,
        )
        # Files of an interrupted or of another build have other shapes, and are built again.
        return SampleIndices(
            *cache.load_or_build(_ARRAYS, build, lambda found: [a.shape for a in found] == shapes)
        )

    def __len__(self) -> int:
        return len(self.indices.shuffle_index)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return sample ``index``.

        Raises:
            IndexError: If there is no such sample.
            DataError: If the sample holds a token id outside the vocabulary.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        config = self.config
        # Without an extra token, the last label is padding.
        text = self._read(index, config.sequence_length + 1)
        tokens, labels = text[:-1].copy(), text[1:]
        is_padding = text == self._pad
        has_padding = bool(is_padding.any())
        loss_mask = np.ones(config.sequence_length, np.float32)
        if has_padding:
            loss_mask[is_padding[1:]] = 0.0
        if config.fim is not None:
            loss_mask[labels == config.fim.pad_id] = 0.0
        # Before the padding gets an id, possibly the id of the end of document.
        documents = self._documents(tokens)
        if config.eod_mask_loss and config.tokenizer is not None:
            loss_mask[tokens == config.tokenizer.eod] = 0.0
        if has_padding:
            # An embedding needs a valid id. These positions are masked already.
            tokens[is_padding[:-1]] = 0
            labels[is_padding[1:]] = 0
        sample = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, **documents}
        return {name: torch.from_numpy(array) for name, array in sample.items()}

    def _documents(self, tokens: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.int64]]:
        """Return the sample's entries derived from the ends of documents in ``tokens`` [s]."""
        config = self.config
        resets = config.reset_position_ids or config.reset_attention_mask
        if config.tokenizer is None or not resets:
            return {}
        ends = tokens == config.tokenizer.eod
        document_ids = ends.cumsum(dtype=np.int64) - ends
        # Explicit even without restarts: beside document_ids, the model's own positions would
        # restart.
        position_ids = np.arange(len(tokens), dtype=np.int64)
        if config.reset_position_ids:
            starts = np.concatenate([[0], np.flatnonzero(ends) + 1])
            position_ids -= starts[document_ids]
        if not config.reset_attention_mask:
            return {"position_ids": position_ids}
        return {"position_ids": position_ids, "document_ids": document_ids}

    def _read(self, index: int, length: int) -> npt.NDArray[np.int64]:
        """Return the tokens of a sample, padded at the end to ``length``."""
        self._read_ahead(index, len(self), self._parts)
        row = self._row(index)
        parts = [self.indexed.get(*part) for part in self._parts(index)]
        text = np.concatenate(parts, dtype=np.int64)
        self._check_ids(text, row)
        fim = self.config.fim
        if fim is not None:
            # of the sample alone: reading order, workers and resumes change nothing
            seeds = [self.config.random_seed, row % 2**32, row // 2**32]
            num_tokens = self.config.sequence_length + self.config.extra_tokens
            text = fim(text, np.random.RandomState(seeds), num_tokens)
        num_missing = length - len(text)
        if not num_missing:
            return text
        return np.concatenate([text, np.full(num_missing, self._pad, np.int64)])

    def _row(self, index: int) -> int:
        """Return the row of the sample index served as sample ``index``."""
        return int(self.indices.shuffle_index[index])

    def _parts(self, index: int) -> list[Part]:
        """Return the parts of a sample."""
        row = self._row(index)
        (first, begin), (last, end) = self.indices.sample_index[row : row + 2].tolist()
        parts: list[Part] = []
        for position in range(first, last + 1):
            offset = begin if position == first else 0
            count = end + self.config.extra_tokens - offset if position == last else None
            parts.append((int(self.indices.document_index[position]), offset, count))
        return parts

    def _check_ids(self, text: npt.NDArray[np.int64], row: int) -> None:
        num_ids = self.config.num_ids
        if num_ids is None or (int(text.min()) >= 0 and int(text.max()) < num_ids):
            return
        first, last = self.indices.sample_index[row : row + 2, 0].tolist()
        for sequence in self.indices.document_index[first : last + 1].tolist():
            tokens = self.indexed[sequence].astype(np.int64)
            positions = np.flatnonzero((tokens < 0) | (tokens >= num_ids))
            if len(positions):
                raise DataError(
                    f"{self.indexed.prefix}.bin: token {positions[0]} of sequence {sequence} is id "
                    f"{tokens[positions[0]]}, but the vocabulary has {num_ids} ids: the data were "
                    "made with another tokenizer; set vocab_size to the size of that tokenizer, or "
                    "run preprocess again"
                )

    def __reduce__(self) -> tuple[object, ...]:
        # a loader's worker maps the files again instead of receiving their bytes
        return (type(self), (self.indexed.prefix, self.config, self.index_split, self.num_samples))
