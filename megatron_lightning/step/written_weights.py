"""Weights written by hooks between two training batches."""

from __future__ import annotations

from megatron_lightning.optim.gradients.accumulation import GradientAccumulation
from megatron_lightning.step.participant import StepBatch, StepParticipant


class WrittenWeights(StepParticipant):
    """Find weights written by hooks, and share these weights with all ranks before a training
    batch.

    Args:
        accumulation: Knows the ranks sharing a weight.
    """

    def __init__(self, accumulation: GradientAccumulation) -> None:
        self._accumulation = accumulation

    def begin_batch(self, batch: StepBatch) -> None:
        """Look for written weights, if due."""
        if not batch.trains:
            return
        self._accumulation.written.before_training(first=batch.number == 1)
        self._accumulation.gather.begin_step()
