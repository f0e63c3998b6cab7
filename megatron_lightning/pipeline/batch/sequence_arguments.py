"""Arguments of the parallel module for a rank's part of a sequence: positions with a start other
than 0, and documents that begin on other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.deal import Deal
from megatron_lightning.parallel.documents import Documents, row_lengths
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.sequence import SequencePart
from megatron_lightning.parallel.sequence_exchange import gather_parts
from megatron_lightning.parallel.shards.sharding import ShardingPlan


class SequenceArguments:
    """Adds arguments to a call of the parallel module. A collective if rows hold documents.

    Args:
        group: The context-parallel ranks.
        plan: Names the keywords.
        length: Positions of the full sequences.
        device: Of the positions.
        deal: Chunks of the ranks. None: zigzag.
    """

    def __init__(
        self,
        group: AxisGroup,
        plan: ShardingPlan,
        length: int,
        device: torch.device,
        deal: Deal | None = None,
    ) -> None:
        self._group = group
        self._part = SequencePart(group.rank, group.size, deal)
        self._plan = plan
        self._length = length
        self._device = device

    def __call__(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments to replace in a call, or to add to the call.

        Args:
            given: Arguments of the call, by name.

        Raises:
            ConfigError: If positions of the call are those of other tokens.
        """
        self._check_zigzag(given)
        keyword, plan = self._plan.positions, self._plan
        documents = self._documents(given)
        if documents is None and self._part.deal is not None:  # attention must know the chunks
            documents = Documents(((0, self._length),), self._part.deal)
        replaced: dict[str, Any] = self._full_rows(given)
        if documents is not None and plan.documents is not None:
            replaced[plan.documents] = documents
        if keyword and given.get(keyword) is None:
            replaced[keyword] = (
                self._part.positions(self._length, self._device)[None]
                if documents is None
                else documents.positions(self._part, self._device)
            )
        if plan.lengths and given.get(plan.lengths) is None:
            replaced[plan.lengths] = self._lengths(given, documents)
        return replaced

    def _full_rows(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that the model needs of full rows and that are a rank's part."""
        size = self._length // self._group.size
        parts = {name: given.get(name) for name in self._plan.full_rows}
        return {
            name: gather_parts(part, self._group, part.ndim - 1, self._part.deal)
            for name, part in parts.items()
            if isinstance(part, Tensor) and part.shape[-1] == size
        }

    def _check_zigzag(self, given: Mapping[str, Any]) -> None:
        """Check that a step computes no zigzag positions for tokens that are dealt by work.

        Raises:
            ConfigError: If it does.
        """
        name = self._plan.positions or "position_ids"
        positions = given.get(name)
        if self._part.deal is None or not isinstance(positions, Tensor):
            return
        zigzag = SequencePart(self._group.rank, self._group.size).positions(self._length)
        own = self._part.positions(self._length)
        if positions.shape[-1:] != own.shape or torch.equal(zigzag, own):
            return
        if bool((positions == zigzag.to(positions.device)).all()):
            raise ConfigError(
                f"{name} of the model's call are those of a rank's two chunks of a "
                "row, and the chunks of packed rows are dealt by work, so that the rank holds "
                "other tokens. Leave the argument out, declare positions of the batch in "
                "sequence_dims, or set ContextOptions(chunks_per_rank=2)."
            )

    def _lengths(self, given: Mapping[str, Any], documents: Documents | None) -> Tensor:
        """Return the lengths of the documents [b or 1, s or 1] of this rank's tokens."""
        if documents is not None:
            return documents.lengths(self._part, self._device)
        positions, padding = (
            None if given.get(name) is None else self._full(name, given[name])
            for name in (self._plan.positions or "", "padding")
        )
        if positions is None:
            positions = torch.arange(self._length, device=self._device)[None]
        return row_lengths(positions, padding)

    def _documents(self, given: Mapping[str, Any]) -> Documents | None:
        """Return the documents of the full rows. None: the call names no documents."""
        plan = self._plan
        if plan.packed_positions:
            positions = given.get(plan.positions or "")
            if not isinstance(positions, Tensor):
                return None
            full = self._full(plan.positions or "", positions)
            documents = Documents.of_positions(full, self._part.deal)
            return None if documents.are_full_rows else documents
        ids = given.get(plan.documents or "")
        if not isinstance(ids, Tensor):
            return None
        return Documents.of_ids(self._full(plan.documents or "", ids), self._part.deal)

    def _full(self, name: str, part: Tensor) -> Tensor:
        """Return the values of all ranks [b, s].

        Raises:
            ConfigError: If the argument is not a rank's part of the sequences.
        """
        shard_length = self._length // self._group.size
        if part.shape[1] != shard_length:
            raise ConfigError(
                f"{name} of the model's call has {part.shape[1]} columns, and this rank's part of "
                f"the sequences {shard_length} positions. Declare the entry of the batch that it "
                "comes from in sequence_dims, and do not cut sequences in the step."
            )
        return gather_parts(part, self._group, 1, self._part.deal)
