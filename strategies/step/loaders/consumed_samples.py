"""Count the samples of training batches, for resuming and for schedules by samples."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lightning.optim.lr_schedules import ScheduledLR
from megatron_lightning.step.participant import StepBatch, StepParticipant
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.strategies.step.loaders.dataloaders import training_samplers


class ConsumedSamples(StepParticipant):
    """Advance the counts of the strategy, of samplers and of schedules.

    Args:
        scope: The run context.
        schedules: Learning-rate schedules that count samples.
    """

    def __init__(self, scope: RunContext, schedules: Sequence[ScheduledLR]) -> None:
        self._scope = scope
        self._schedules = schedules

    def begin_batch(self, batch: StepBatch) -> None:
        """Count a training batch, unless already counted: line searches repeat the step."""
        if not batch.trains:
            return
        trainer, total = self._scope.module.trainer, batch.num_samples * self._scope.context.dp.size
        number = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if self._scope.progress.count(number, total):
            for sampler in training_samplers(trainer):
                sampler.advance()
            for schedule in self._schedules:
                schedule.count_samples(total)

    def after_update(self, *, stepped: bool) -> None:
        """Count a skipped step. The samples of the step move no schedule."""
        if not stepped:
            self._scope.progress.skipped_steps += 1
            for schedule in self._schedules:
                schedule.forget_samples()
