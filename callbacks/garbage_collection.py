"""Run Python's garbage collection on all ranks in the same steps."""

from __future__ import annotations

import gc
from typing import Any

import lightning.pytorch as pl

from megatron_lightning.config.value_checks import is_count
from megatron_lightning.errors import ConfigError
from megatron_lightning.lightning_internals.loops import is_accumulating


class GarbageCollection(pl.Callback):
    """Collect garbage after every ``every_n_steps`` optimizer steps, and at no other time of a fit.

    Python collects when a rank has made enough objects. Every rank then collects in another step,
    and in each of these steps all ranks wait for the collecting rank.

    Args:
        every_n_steps: Optimizer steps between two collections.

    Raises:
        ConfigError: If ``every_n_steps`` is not a positive number.
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        if not is_count(every_n_steps):
            raise ConfigError(f"every_n_steps is {every_n_steps!r}; it must be a positive integer.")
        self.every_n_steps = every_n_steps
        self.collections = 0
        """Collections of this fit."""
        self._was_enabled = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collect, and switch the automatic collection off."""
        self._was_enabled = gc.isenabled()
        self.collections = 0
        gc.disable()
        gc.collect()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Collect if due. The step decides, so that all ranks collect together."""
        if not is_accumulating(trainer) and trainer.global_step % self.every_n_steps == 0:
            gc.collect()
            self.collections += 1

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Switch the automatic collection on again."""
        self._restore()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Switch the automatic collection on again."""
        self._restore()

    def _restore(self) -> None:
        if self._was_enabled:
            gc.enable()
            self._was_enabled = False
