"""Bytes of activations along a forward and its backward: a tape of operations. No torch here.

Autograd keeps tensors from an operation's forward to its backward, so the live bytes rise along the
tape and fall on the way back:

    forward    kept by the operations so far + the operation's output and temporaries
    backward   kept by this and earlier operations + the operation's gradients and temporaries

Tensors have names, since two operations may keep the same tensor. A *segment* of the tape may be
recomputed: only the segment's inputs are kept, and the segment's backward starts with another
forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

Kept = Mapping[str, float]
"""Bytes of each kept tensor, by name."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation of a layer, on one rank and micro-batch."""

    path: str
    """Path of the running module from the model."""
    keeps: Kept = field(default_factory=dict)
    """Tensors kept for backward, without weights."""
    inputs: Kept = field(default_factory=dict)
    """Tensors read, before a collective or cast."""
    makes: tuple[str, ...] = ()
    """Names of the outputs. Later operations may keep the outputs."""
    forward_bytes: float = 0.0
    """Output and temporaries during forward, beyond the kept tensors."""
    backward_bytes: float = 0.0
    """Gradients and temporaries during backward."""
    weight_gradient_bytes: float = 0.0
    """Bytes of the weight gradient before accumulation."""
    deferred: Kept = field(default_factory=dict)
    """Tensors kept from the backward on, for a deferred weight gradient."""


@dataclass(frozen=True)
class Segment:
    """Operations kept or recomputed together."""

    operations: tuple[Operation, ...]
    recomputed: bool = False

    def kept(self) -> Kept:
        """Return the tensors kept from forward to backward."""
        if not self.recomputed:
            return _union(operation.keeps for operation in self.operations)
        names = {name for operation in self.operations for name in operation.makes}
        inputs = _union(operation.inputs for operation in self.operations)
        return {name: size for name, size in inputs.items() if name not in names}


@dataclass(frozen=True)
class Profile:
    """Bytes of one micro-batch on one stage."""

    kept: float
    """From forward to backward."""
    forward_peak: float
    """Most bytes during forward, including kept tensors."""
    backward_peak: float
    """Most bytes during backward, including tensors still kept.

    For a split backward: during the first half.
    """
    deferred: float = 0.0
    """Between the two halves of a split backward."""


def compiled(operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations of a single graph.

    A graph's backward returns all weight gradients together, at the end.
    """
    waiting, together = 0.0, list[Operation]()
    for operation in reversed(operations):
        waiting += operation.weight_gradient_bytes
        together.append(replace(operation, weight_gradient_bytes=waiting))
    return together[::-1]


def profile(segments: Sequence[Segment], *, split_backward: bool = False) -> Profile:
    """Return the bytes along a tape.

    Args:
        segments: The tape.
        split_backward: Whether weight gradients are deferred.
    """
    kept_before: list[Kept] = []
    kept_now: Kept = {}
    forward = 0.0
    for segment in segments:
        kept_before.append(kept_now)
        forward = max(forward, _forward_peak(kept_now, segment))
        kept_now = _union((kept_now, segment.kept()))
    backward, deferred = 0.0, dict[str, float]()
    for segment, kept_earlier in zip(reversed(segments), reversed(kept_before), strict=True):
        alive = kept_earlier
        if segment.recomputed:
            alive = _union((kept_earlier, segment.kept()))
            backward = max(backward, _forward_peak(alive, replace(segment, recomputed=False)))
        peak = _backward_peak(alive, segment, deferred, split_backward)
        backward = max(backward, peak)
    return Profile(_size(kept_now), forward, backward, _size(deferred) if split_backward else 0.0)


def _forward_peak(kept: Kept, segment: Segment) -> float:
    peak = 0.0
    for operation in segment.operations:
        alive = _union((kept, operation.keeps))
        peak = max(peak, _size(alive) + operation.forward_bytes)
        kept = kept if segment.recomputed else alive
    return peak


def _backward_peak(
    kept: Kept, segment: Segment, deferred: dict[str, float], split_backward: bool
) -> float:
    """Return the most bytes of a segment's backward. Add the deferred tensors to ``deferred``."""
    alive = [kept]
    for operation in segment.operations:
        alive.append(_union((alive[-1], operation.keeps)))
    peak = 0.0
    for operation, alive_before in zip(reversed(segment.operations), reversed(alive), strict=False):
        if split_backward:
            deferred |= operation.deferred
            size = _size(_union((alive_before, deferred)))
        else:
            size = _size(alive_before) + operation.weight_gradient_bytes
        peak = max(peak, size + operation.backward_bytes)
    return peak


def _union(kept: Iterable[Kept]) -> Kept:
    together: dict[str, float] = {}
    for tensors in kept:
        together |= tensors
    return together


def _size(kept: Kept) -> float:
    return sum(kept.values())
