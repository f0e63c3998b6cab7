"""Verdict on steps that select positions in a rank's part of a sequence.

``strategies/step/values/sequence_parts.py`` divides sequences, knows the tensors with a part, and
enters the watch (``guards/watches/position_watch.py``) around the first step of a kind.
"""

from __future__ import annotations

from megatron_lightning.guards.guard import Guard


class SequencePositions(Guard):
    """Name and verdict. The tensors are followed where sequences are divided."""

    sentence = (
        "context parallelism: a step shifts, indexes or reduces a sequence, of which each rank "
        "holds a part"
    )
