"""What a strategy has counted: samples, batches, steps. What data a run has seen follows from it, also after a checkpoint."""

from __future__ import annotations

from typing import Any

from megatron_lightning.optim.schedules import ScheduledLR
from megatron_lightning.parallel.layout import ParallelLayout
from megatron_lightning.strategies.environment import MegatronEnvironment
from megatron_lightning.strategies.launchers import StartMethod
from megatron_lightning.strategies.lightning_internals import training_loaders
from megatron_lightning.strategies.sampling import ResumableSampler, sampler_of


class MegatronCounts(MegatronEnvironment):
    """Counts samples and steps of training.

    Args:
        layout: Sizes of the parallel axes.
        start_method: See :class:`MegatronEnvironment`.
        process_group_backend: See :class:`MegatronEnvironment`.
        timeout_s: See :class:`MegatronEnvironment`.
    """

    def __init__(
        self, layout: ParallelLayout, *, start_method: StartMethod, process_group_backend: str | None, timeout_s: float
    ) -> None:
        super().__init__(layout, start_method=start_method, process_group_backend=process_group_backend, timeout_s=timeout_s)
        self.consumed_samples = 0
        """Samples that all data-parallel ranks together have trained on, those of skipped steps included."""
        self.skipped_steps = 0
        """Optimizer steps that were left out because a gradient was not finite."""
        self._batch_counted, self._batch_samples = -1, 0
        self._updated_from = -1  # step from which the last update of the weights began

    def train_samplers(self) -> list[ResumableSampler]:
        """Return the samplers of the training data that this strategy made."""
        samplers = [sampler_of(loader) for loader in training_loaders(self.module.trainer)]
        return [sampler for sampler in samplers if sampler is not None]

    def count_samples(self, num_samples: int) -> None:
        """Take note of the samples of a training batch, over all data-parallel ranks.

        Once: an optimizer that searches along a line runs the step several times with the same batch.
        """
        batch = self.module.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if batch == self._batch_counted:
            return
        self._batch_counted, self._batch_samples = batch, num_samples
        self.consumed_samples += num_samples
        for sampler in self.train_samplers():
            sampler.advance()
        for scheduler in self._scheduled():
            scheduler.count_samples(num_samples)

    def forget_batch(self) -> None:
        """Take back the count of a batch that an exception ended before it was trained on, so that it comes again."""
        progress: Any = self.module.trainer.fit_loop.epoch_loop.batch_progress.total
        if not progress.processed < progress.ready == self._batch_counted:
            return
        self._batch_counted = -1
        self.consumed_samples -= self._batch_samples
        for sampler in self.train_samplers():
            sampler.go_back()

    def _begin_counting(self) -> None:
        """Take the next batch for one that has not been counted, whatever its number: training begins."""
        self._batch_counted = -1

    @property
    def is_updating(self) -> bool:
        """Whether an optimizer step has begun that the Trainer has not counted: weights are of this step or of the next."""
        return self._updated_from == self.module.trainer.global_step

    def _scheduled(self) -> list[ScheduledLR]:
        """Return the schedulers that want to know about samples."""
        return [config.scheduler for config in self.lr_scheduler_configs if isinstance(config.scheduler, ScheduledLR)]
