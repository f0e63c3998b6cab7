"""Save a checkpoint when a run is to stop, on an exception, and at an interval of minutes."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from megatron_lightning.errors import ConfigError
from megatron_lightning.launch.stopping import StopOnRequest, save_for_requeue
from megatron_lightning.lightning_internals.checkpoints import SavesBeside
from megatron_lightning.lightning_internals.loops import is_accumulating
from megatron_lightning.resilience.exit_codes import STOPPED
from megatron_lightning.resilience.lifecycle.stop_requests import Reason
from megatron_lightning.step.agreed_stop import AgreedStop
from megatron_lightning.strategies.checkpoint.loop_progress import await_validation


class RescueCheckpoint(SavesBeside):
    """Keep one checkpoint, ``rescue.ckpt``, to resume from after an interruption.
    ``ckpt_path="last"`` finds this checkpoint.

    Works beside other ``ModelCheckpoint`` callbacks. ``"last"`` is the newest checkpoint of all
    callbacks. A complete save replaces the one before.

    * SIGTERM to any rank, as sent by Slurm, Kubernetes and torchrun before the end of a job: all
      ranks finish the optimizer step or the batch of validation, save, and end with ``AgreedStop``,
      a ``SIGTERMException`` that counts as no rank's failure. A resumed run repeats an interrupted
      validation. The sanity check, ``validate``, ``test`` and ``predict`` end without a save.
      Lightning's own handling of the signal, with communication inside of the handler, is off.
    * Slurm's requeue signal (``SLURMEnvironment``, SIGUSR1): all ranks save ``hpc_ckpt_<n>.ckpt``
      in ``default_root_dir``. Lightning resumes from this file by itself. Rank 0 requeues the job,
      and all ranks end.
    * A stop file, or ``exit_after``, the time limit of this run: as SIGTERM.
    * An exception on all ranks, including Ctrl-C: all ranks save. After an exception on only a part
      of the ranks nothing can be saved (the other ranks hold the rest of the model). The last timed
      save remains.
    * Every ``every_n_minutes``, by rank 0's clock.

    Args:
        dirpath: Folder. None: the folder of the first other ``ModelCheckpoint`` that has one, or as
            for ``ModelCheckpoint``.
        every_n_minutes: Minutes between two timed saves. None: no timed saves.
        on_sigterm: Whether to save on SIGTERM and on Slurm's requeue signal.
        on_exception: Whether to save on an exception.
        stop_file: File that stops the run once the file exists (``touch STOP``), within about a
            second and a step. The file is then removed. None: no stop file.
        exit_after: Time after which the run stops, by rank 0's clock, counted from the start. None:
            no limit.
        exit_code: Exit code of a run after a stop on request and a save: 75 tells a scheduler to
            start the same command again. Under torchrun the exit code is 0, since torchrun takes
            every other code for a failure. ``stopped.json`` in ``default_root_dir`` always holds
            the reason.
    """

    CHECKPOINT_NAME_LAST = "rescue"

    def __init__(
        self,
        dirpath: str | Path | None = None,
        every_n_minutes: float | None = None,
        on_sigterm: bool = True,
        on_exception: bool = True,
        *,
        stop_file: str | Path | None = None,
        exit_after: timedelta | None = None,
        exit_code: int = STOPPED,
    ) -> None:
        if every_n_minutes is not None and every_n_minutes <= 0:
            raise ConfigError(
                f"every_n_minutes is {every_n_minutes}. Set it to a positive number, or leave it "
                "out."
            )
        if exit_after is not None and exit_after <= timedelta(0):
            raise ConfigError(
                f"exit_after is {exit_after}. Set it to a positive time, or leave it out."
            )
        super().__init__(
            dirpath=dirpath,
            save_top_k=0,
            save_last=True,
            save_on_exception=on_exception,
            every_n_train_steps=0,
            every_n_epochs=0,
            train_time_interval=None
            if every_n_minutes is None
            else timedelta(minutes=every_n_minutes),
            enable_version_counter=False,
        )
        self.stopping: StopOnRequest | None = None
        """Ends the run on request. None: only exceptions and the clock save."""
        if on_sigterm or stop_file is not None or exit_after is not None:
            self.stopping = StopOnRequest(
                self._save_for_stop,
                handles_sigterm=on_sigterm,
                handles_requeue=on_sigterm,
                stop_file=stop_file,
                exit_after=exit_after,
                exit_code=exit_code,
            )

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Begin to count time."""
        super().setup(trainer, pl_module, stage)
        if self.stopping is not None:
            self.stopping.setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the signal handlers."""
        super().on_train_start(trainer, pl_module)
        if self.stopping is not None:
            self.stopping.on_train_start(trainer, pl_module)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save if a save is due or a stop is requested. A collective on every optimizer step.

        Raises:
            AgreedStop: On every rank, after saving.
        """
        if is_accumulating(trainer):
            return  # half of an optimizer step: checkpoints hold no gradients
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self.stopping is not None:
            self.stopping.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the signal handlers, and remove a stop file of the last moment."""
        if self.stopping is not None:
            self.stopping.on_train_end(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the signal handlers, and agree with the other ranks on the batches common to all
        ranks.
        """
        if self.stopping is not None:
            self.stopping.on_validation_start(trainer, pl_module)

    on_test_start = on_predict_start = on_validation_start

    def on_validation_batch_end(  # noqa: PLR0917  # Lightning's signature
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Save and end after a request to stop. A collective on every batch common to all ranks.

        Raises:
            AgreedStop: On every rank.
        """
        if self.stopping is not None:
            self.stopping.on_validation_batch_end(
                trainer, pl_module, outputs, batch, batch_idx, dataloader_idx
            )

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the signal handlers, unless training continues."""
        super().on_validation_end(trainer, pl_module)
        if self.stopping is not None:
            self.stopping.on_validation_end(trainer, pl_module)

    on_test_end = on_predict_end = on_validation_end

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Make a run resumed from an interrupted validation repeat the validation."""
        if self.stopping is not None and self.stopping.in_validation:
            await_validation(checkpoint["loops"]["fit_loop"])

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Save on an exception of all ranks, unless this step is saved."""
        if self.stopping is not None:
            self.stopping.restore_handlers()
        saved = isinstance(exception, AgreedStop)
        if (
            not saved
            and trainer.state.fn == TrainerFn.FITTING
            and self._should_save_on_exception(trainer)
        ):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def _save_for_stop(self, trainer: pl.Trainer, reason: Reason) -> str | None:
        """Save to the path sought by the next start. Return the path."""
        if reason is Reason.REQUEUE:
            return save_for_requeue(trainer, reason)
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
        return self.last_model_path or None
