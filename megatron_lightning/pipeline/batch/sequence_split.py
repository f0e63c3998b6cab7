"""Divide the sequences of a batch over the context-parallel ranks.

The user declares the entries with sequences (``sequence_dims`` of the LightningModule or the
datamodule). Entries are never guessed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.deal import Deal
from megatron_lightning.parallel.sequence import SequencePart
from megatron_lightning.rules import check_sequence_length

IGNORED_LABEL = -100
"""Target ignored by losses, as in torch."""


class SequenceSplit:
    """Splits batches along their sequences.

    Args:
        part: This rank's part of the sequences.
        dims: Key of a batch (index, for a tuple or list) -> dim of the sequence.
        tensor_ranks: Tensor-parallel ranks that divide the sequence of activations further. 1: no
            further division.
    """

    def __init__(self, part: SequencePart, dims: Mapping[Any, int], tensor_ranks: int = 1) -> None:
        self.part = part
        self.dims = dict(dims)
        self._tensor_ranks = tensor_ranks

    def split(self, batch: Any, deal: Deal | None = None) -> Any:
        """Return the rank's part of a batch.

        Args:
            batch: The batch.
            deal: Chunks of all ranks. None: zigzag.

        Raises:
            ConfigError: If the batch has none of the declared entries, an entry is no sequence, or
                the entries' lengths differ or do not divide.
        """
        self.length(batch)
        part = replace(self.part, deal=deal)
        if isinstance(batch, Mapping):
            split = copy.copy(batch)
            for key, value in batch.items():
                split[key] = self._part_of(part, key, value)  # type: ignore[index]
            return split
        values = [self._part_of(part, index, value) for index, value in enumerate(batch)]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)

    def parts(self, part: Any) -> list[tuple[Tensor, int]]:
        """Return the tensors with sequences in a split batch, and the sequence dim of each
        tensor.
        """
        return [(tensor, self.dims[key]) for key, tensor in self._declared(part).items()]

    def origins(self, parts: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors of split batches that were divided, and all others."""
        divided = [tensor for part in parts for tensor, _ in self.parts(part)]
        own = {id(tensor) for tensor in divided}
        leaves = (leaf for part in parts for leaf in tree_leaves(part))
        return divided, [x for x in leaves if isinstance(x, Tensor) and id(x) not in own]

    def part_length(self, part: Any) -> int:
        """Return the number of positions of a rank's part of a batch."""
        return next(iter(self._length_of(*entry) for entry in self._declared(part).items()))

    def length(self, batch: Any) -> int:
        """Return the number of positions of a full batch."""
        declared = self._declared(batch)
        lengths = {key: self._length_of(key, value) for key, value in declared.items()}
        if len(set(lengths.values())) > 1:
            raise ConfigError(
                f"entries of the batch have sequences of different lengths: {lengths}. Correct "
                "sequence_dims, or pad them to one length."
            )
        name, length = next(iter(lengths.items()))
        check_sequence_length(
            length, self.part.num_ranks, self._tensor_ranks, f"{name!r} of the batch"
        )
        return length

    def masks(self, batch: Any) -> str | None:
        """Return the declared entry that leaves positions out of the loss. None: no such entry."""
        for name, value in self._declared(batch).items():
            if name == "loss_mask":
                return "a loss_mask"
            if not value.is_floating_point() and bool((value == IGNORED_LABEL).any()):
                return f"{IGNORED_LABEL} in {name!r}"
        return None

    def _part_of(self, part: SequencePart, key: Any, value: Any) -> Any:
        dim = self.dims.get(key)
        return value if dim is None or value is None else part.split(value, dim)

    def _declared(self, batch: Any) -> dict[Any, Tensor]:
        entries = batch if isinstance(batch, Mapping) else {}
        if isinstance(batch, list | tuple):
            entries = dict(enumerate(batch))
        declared = {k: v for k, v in entries.items() if k in self.dims and v is not None}
        if not declared:
            keys = list(entries) or type(batch).__name__
            raise ConfigError(
                f"the batch has {keys} and none of {list(self.dims)}, which sequence_dims "
                "declares. Name the entries of the batch there (of a tuple: their indices)."
            )
        return declared

    def _length_of(self, key: Any, value: Any) -> int:
        dim = self.dims[key]
        if not isinstance(value, Tensor) or not -value.ndim <= dim < value.ndim:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(
                f"sequence_dims declares dim {dim} of {key!r}, which is {shape}. Correct the dim."
            )
        return value.shape[dim]
