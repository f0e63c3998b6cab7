"""Divide sequences over context-parallel ranks, by a :class:`Deal` of their chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lightning.parallel.deal import Deal


@dataclass(frozen=True)
class SequencePart:
    """A rank's part of every sequence."""

    rank: int = 0
    num_ranks: int = 1
    deal: Deal | None = None
    """Chunks of all ranks. None: zigzag."""

    @property
    def chunks(self) -> tuple[int, ...]:
        """Numbers of the rank's chunks, in order."""
        if self.num_ranks == 1:
            return (0,)
        return (self.deal or Deal.zigzag(self.num_ranks)).chunks(self.rank)

    def spans(self, length: int) -> tuple[range, ...]:
        """Return the rank's positions of ``length``, in order."""
        chunks = self.chunks
        size = length // (len(chunks) * self.num_ranks)
        return tuple(range(index * size, (index + 1) * size) for index in chunks)

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Return the rank's positions of ``length``, as a tensor."""
        spans = self.spans(length)
        return torch.cat([torch.arange(span.start, span.stop, device=device) for span in spans])

    def split(self, full: Tensor, dim: int) -> Tensor:
        """Return the rank's part of ``full``, with the sequence in dim ``dim``."""
        if self.num_ranks == 1:
            return full
        spans = self.spans(full.shape[dim])
        return torch.cat([full.narrow(dim, span.start, len(span)) for span in spans], dim)


def join(parts: Sequence[Tensor], dim: int, deal: Deal | None = None) -> Tensor:
    """Return the full tensor, given the parts of all ranks in order. Undoes
    :meth:`SequencePart.split`.

    Args:
        parts: Of the ranks.
        dim: Of the sequence.
        deal: Chunks of the ranks. None: zigzag.
    """
    if len(parts) == 1:
        return parts[0]
    owners = (deal or Deal.zigzag(len(parts))).owners
    chunks = [iter(part.chunk(len(owners) // len(parts), dim)) for part in parts]
    return torch.cat([next(chunks[owner]) for owner in owners], dim)
