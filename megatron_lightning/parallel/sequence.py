"""Divide sequences over context-parallel ranks.

A causal query late in a sequence sees more keys than an early query. So s positions are cut into 2c
chunks for c ranks, and rank r holds chunks r and 2c-1-r (*zigzag*, as ``get_batch_on_this_cp_rank``
of Megatron-LM does): all ranks do the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequencePart:
    """A rank's part of every sequence."""

    rank: int = 0
    num_ranks: int = 1

    def spans(self, length: int) -> tuple[range, ...]:
        """Return the rank's positions of ``length``, in order."""
        if self.num_ranks == 1:
            return (range(length),)
        chunk = length // (2 * self.num_ranks)
        chunks = (self.rank, 2 * self.num_ranks - 1 - self.rank)
        return tuple(range(index * chunk, (index + 1) * chunk) for index in chunks)

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


def join(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return the full tensor, given the parts of all ranks in order. Undoes
    :meth:`SequencePart.split`.
    """
    if len(parts) == 1:
        return parts[0]
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], dim)
