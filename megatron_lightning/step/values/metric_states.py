"""Metrics of torchmetrics updated by a step. All other stages follow the last stage."""

from __future__ import annotations

from typing import Any

from megatron_lightning.pipeline.batch.metrics import MetricSync
from megatron_lightning.step.participant import StepBatch, StepParticipant
from megatron_lightning.step.step_run import StepRun


class MetricStates(StepParticipant):
    """Find metrics made by hooks, and mark the metrics updated by the last stage as updated on all
    stages.

    Args:
        metrics: Synchronizes the metrics of the run.
    """

    def __init__(self, metrics: MetricSync) -> None:
        self._metrics = metrics

    def begin_batch(self, batch: StepBatch) -> None:
        """Look for metrics again after hooks have run."""
        if batch.begins_loop:
            self._metrics.find()

    def begin(self, run: StepRun) -> None:
        """Record the metrics updated earlier."""
        self._metrics.begin_step()

    def share(self, run: StepRun) -> dict[str, list[int]]:
        """Return the numbers of updates."""
        return self._metrics.counts()

    def apply(self, run: StepRun, shared: Any) -> None:
        """Follow the last stage's updates."""
        self._metrics.follow(shared)
