"""Positions and visible keys of a sequence, as arguments of attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SequenceInfo:
    """Positions and visible keys of a batch of sequences."""

    position_ids: Tensor | None = None
    """[b or 1, s] positions of the queries; None: 0 to s-1."""
    causal: bool = True
    """Whether a query sees the keys of no later position."""
    window: int | None = None
    """How many positions back a causal query sees beside its own; None: all."""
