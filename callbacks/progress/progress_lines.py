"""Progress as lines of text, where a bar would fill a log file with its repaints."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning_utilities.core.rank_zero import rank_zero_only

from megatron_lightning.callbacks.progress.last_losses import LastLosses

_INTERVAL_S = 30.0


def use_lines_in_files(bar: ProgressBar | None) -> list[pl.Callback]:
    """Disable a bar of Lightning if the output is no terminal. Return the callbacks to add
    instead.
    """
    if sys.stdout.isatty() or not isinstance(bar, TQDMProgressBar | RichProgressBar):
        return []
    if not bar.is_enabled:
        return []
    bar.disable()
    return [ProgressLines()]


class ProgressLines(pl.Callback):
    """Print epoch, step and losses about twice a minute.

    Args:
        interval_s: Seconds between two lines.
    """

    def __init__(self, interval_s: float = _INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._printed_s = 0.0
        self._losses = LastLosses()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to count time."""
        self._printed_s = time.monotonic()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Print a line if one is due."""
        self._losses.keep(outputs)
        if time.monotonic() - self._printed_s >= self._interval_s:
            self._print(trainer)
            self._printed_s = time.monotonic()

    @rank_zero_only
    def _print(self, trainer: pl.Trainer) -> None:
        of_steps = f" of {trainer.max_steps}" if trainer.max_steps > 0 else ""
        progress = f"epoch {trainer.current_epoch}, step {trainer.global_step}{of_steps}"
        losses = self._losses.texts(trainer)
        print(progress + (f"; losses: {', '.join(losses)}" if losses else ""), flush=True)
