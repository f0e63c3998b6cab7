"""Log every step of a short run, of which Lightning's default logs hardly any."""

from __future__ import annotations

import math

import lightning.pytorch as pl

_SHORT = 100  # steps


class LogShortRuns(pl.Callback):
    """Set ``log_every_n_steps`` to 1 if a fit has fewer than 100 steps.

    The command line adds this callback to ``fit`` if nobody has set ``log_every_n_steps``.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the number of steps."""
        if num_steps(trainer) < _SHORT:
            vars(trainer)["log_every_n_steps"] = 1


def num_steps(trainer: pl.Trainer) -> float:
    """Return the optimizer steps of a fit from its beginning. Infinity: unknown."""
    steps_in_epoch = math.inf
    if not math.isinf(trainer.num_training_batches):
        steps_in_epoch = -(-trainer.num_training_batches // trainer.accumulate_grad_batches)
    epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
    steps = math.inf if trainer.max_steps < 0 else trainer.max_steps
    return min(steps, epochs * steps_in_epoch) if epochs else 0
