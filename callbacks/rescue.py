"""Save what would be lost: on SIGTERM, on an exception, and every so many minutes."""

from __future__ import annotations

import signal
import threading
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from megatron_lightning.errors import ConfigError
from megatron_lightning.strategies.failure import AgreedStop


class RescueCheckpoint(ModelCheckpoint):
    """Keeps one checkpoint, ``rescue.ckpt``, for going on after an interruption; ``ckpt_path="last"`` finds it.

    It stands beside the run's other ``ModelCheckpoint`` callbacks; ``"last"`` is the newest of all. Each save replaces the one
    before when it is complete.

    * SIGTERM, as Slurm and Kubernetes send it before they end a job, to any rank: all ranks finish the optimizer step, save
      and leave with ``AgreedStop``, a ``SIGTERMException`` that counts as nobody's failure. Lightning's own handling of the
      signal, which communicates inside of the signal handler, is off while training runs.
    * An exception that all ranks meet, Ctrl-C among them: they save what they have. One that only some ranks meet cannot be
      saved (the others have the rest of the model); the last save in time stands.
    * Every ``every_n_minutes``, by rank 0's clock.

    Args:
        dirpath: Folder; None: as for ``ModelCheckpoint``.
        every_n_minutes: Minutes between two saves in time; None: none of those.
        on_sigterm: Whether to save on SIGTERM.
        on_exception: Whether to save on an exception.

    Raises:
        ConfigError: If ``every_n_minutes`` is not positive.
    """

    CHECKPOINT_NAME_LAST = "rescue"

    def __init__(
        self,
        dirpath: str | Path | None = None,
        every_n_minutes: float | None = None,
        on_sigterm: bool = True,
        on_exception: bool = True,
    ) -> None:
        if every_n_minutes is not None and every_n_minutes <= 0:
            raise ConfigError(f"every_n_minutes is {every_n_minutes}. Set it to a positive number, or leave it out.")
        super().__init__(
            dirpath=dirpath,
            save_top_k=0,
            save_last=True,
            save_on_exception=on_exception,
            every_n_train_steps=0,
            every_n_epochs=0,
            train_time_interval=None if every_n_minutes is None else timedelta(minutes=every_n_minutes),
            enable_version_counter=False,
        )
        self._on_sigterm, self._received = on_sigterm, False
        self._previous: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over SIGTERM."""
        super().on_train_start(trainer, pl_module)
        self._received = False
        if self._on_sigterm and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._note)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is time or a rank was told to end; a collective on every batch.

        Raises:
            AgreedStop: On every rank, after saving.
        """
        if trainer.fit_loop._should_accumulate():
            return  # half of an optimizer step: its gradients are not part of a checkpoint
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._on_sigterm and trainer.strategy.reduce_boolean_decision(self._received, all=False):
            if not self._should_skip_saving_checkpoint(trainer):
                self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
            raise AgreedStop

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give SIGTERM back; a run that ended well needs no rescue."""
        self._give_back()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Save, if all ranks are here and it has not been done for this step."""
        self._give_back()
        if self._should_save_on_exception(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._received = True

    def _give_back(self) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None
