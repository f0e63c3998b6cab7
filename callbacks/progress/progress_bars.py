"""Lightning's progress bars, counting to the last step of the run instead of to the end of an epoch
that the run does not reach.
"""

from __future__ import annotations

from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar


def count_to_max_steps(bar: ProgressBar | None) -> None:
    """Make a bar of Lightning end at ``max_steps``. Bars of other classes are left alone."""
    kinds = {TQDMProgressBar: _TQDMToMaxSteps, RichProgressBar: _RichToMaxSteps}
    if bar is not None and type(bar) in kinds:
        bar.__class__ = kinds[type(bar)]


class _ToMaxSteps(ProgressBar):
    @property
    def total_train_batches(self) -> int | float:
        """Batches of the current epoch until its end or the last step."""
        # Lightning counts steps, and from the resumed step, but only without max_epochs.
        trainer = self.trainer
        total = trainer.num_training_batches
        # With manual optimization the number of steps in a batch is the module's.
        if trainer.max_steps < 0 or not trainer.lightning_module.automatic_optimization:
            return total
        progress = trainer.fit_loop.epoch_loop.batch_progress
        # Before the first batch Lightning still knows those of the epoch before.
        # A bar resumed inside of an epoch asks first when a batch ends: ready, and its step is
        # counted, but not yet completed.
        current = progress.current
        is_between = current.ready == current.completed
        done = 0 if progress.is_last_batch and is_between else current.ready
        accumulated = trainer.accumulate_grad_batches
        left = (trainer.max_steps - trainer.global_step) * accumulated - done % accumulated
        return min(total, done + max(0, left))


class _TQDMToMaxSteps(_ToMaxSteps, TQDMProgressBar):
    pass


class _RichToMaxSteps(_ToMaxSteps, RichProgressBar):
    pass
