"""Save a checkpoint on SIGTERM, on an exception, and at an interval of minutes."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import warnings
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.replica_rng import ReplicaStreams
from megatron_lightning.strategies.launch.failures import AgreedStop
from megatron_lightning.strategies.lightning_internals import (
    connector_of,
    is_accumulating,
    requeue_path,
)
from megatron_lightning.strategies.megatron import MegatronStrategy


class RescueCheckpoint(ModelCheckpoint):
    """Keep one checkpoint, ``rescue.ckpt``, to resume from after an interruption;
    ``ckpt_path="last"`` finds it.

    It may be used with other ``ModelCheckpoint`` callbacks; ``"last"`` is the newest of all. A
    complete save replaces the one before.

    * SIGTERM, as Slurm, Kubernetes and torchrun send it before they end a job, to any rank: all
      ranks finish the optimizer step or the batch of validation, save, and end with ``AgreedStop``,
      a ``SIGTERMException`` that is no rank's failure. A resumed run repeats an interrupted
      validation. The sanity check, ``validate``, ``test`` and ``predict`` end without a save.
      Lightning's own handling of the signal, which communicates inside the handler, is off.
    * Slurm's requeue signal (``SLURMEnvironment``; SIGUSR1): all ranks save ``hpc_ckpt_<n>.ckpt``
      in ``default_root_dir``, from which Lightning resumes by itself; rank 0 requeues the job, and
      all end.
    * An exception on all ranks, Ctrl-C among them: they save. An exception on only some ranks
      cannot be saved (the others hold the rest of the model); the last timed save remains.
    * Every ``every_n_minutes``, by rank 0's clock.

    Args:
        dirpath: Folder; None: as for ``ModelCheckpoint``.
        every_n_minutes: Minutes between two timed saves; None: no timed saves.
        on_sigterm: Whether to save on SIGTERM and on Slurm's requeue signal.
        on_exception: Whether to save on an exception.
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
            raise ConfigError(
                f"every_n_minutes is {every_n_minutes}. Set it to a positive number, or leave it "
                "out."
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
        self._on_sigterm = on_sigterm
        self._received = 0  # 1: SIGTERM, 2: the requeue signal
        self._previous: dict[int, Any] = {}
        self._num_batches: list[int] = []
        self._before_evaluation: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._repeats_validation = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the signal handlers."""
        super().on_train_start(trainer, pl_module)
        self._install_handlers(trainer)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save if it is time or a rank received a signal; a collective on every batch.

        Raises:
            AgreedStop: On every rank, after saving.
        """
        if is_accumulating(trainer):
            return  # half of an optimizer step: its gradients are not part of a checkpoint
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._before_evaluation = _streams(trainer).states()
        self._end_if_signaled(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the signal handlers."""
        self._restore_handlers()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the signal handlers, and agree with the other ranks on the batches that all of
        them have.
        """
        self._install_handlers(trainer)
        counts = {
            RunningStage.SANITY_CHECKING: trainer.num_sanity_val_batches,
            RunningStage.VALIDATING: trainer.num_val_batches,
            RunningStage.TESTING: trainer.num_test_batches,
            RunningStage.PREDICTING: trainer.num_predict_batches,
        }
        own = counts[trainer.state.stage] if trainer.state.stage is not None else 0
        of_ranks: list[Any] = [own if isinstance(own, list) else [own]]
        if dist.is_initialized():
            of_ranks *= dist.get_world_size()
            dist.all_gather_object(of_ranks, of_ranks[0])
        fewest = [min(numbers) for numbers in zip(*of_ranks, strict=True)]
        self._num_batches = [0 if math.isinf(number) else int(number) for number in fewest]

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
        """Save and end if a rank received a signal; a collective on every batch that all ranks
        have.

        Raises:
            AgreedStop: On every rank.
        """
        fitting = trainer.state.fn == TrainerFn.FITTING
        is_shared = (
            dataloader_idx < len(self._num_batches)
            and batch_idx < self._num_batches[dataloader_idx]
        )
        if not is_shared or (fitting and not trainer.sanity_checking and is_accumulating(trainer)):
            return
        self._repeats_validation = fitting and not trainer.sanity_checking
        self._end_if_signaled(trainer)
        self._repeats_validation = False

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the signal handlers, unless training continues."""
        super().on_validation_end(trainer, pl_module)
        if trainer.state.fn != TrainerFn.FITTING:
            self._restore_handlers()

    on_test_end = on_predict_end = on_validation_end

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Make a run that resumes from an interrupted validation repeat it."""
        if self._repeats_validation:
            progress = type(trainer.fit_loop.epoch_loop.val_loop.batch_progress)()
            progress.increment_ready()
            # Lightning returns to a validation that was in its first step.
            progress.increment_started()
            checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"] = (
                progress.state_dict()
            )

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Save on an exception of all ranks, unless this step is saved."""
        self._restore_handlers()
        saved = isinstance(exception, AgreedStop)
        if (
            not saved
            and trainer.state.fn == TrainerFn.FITTING
            and self._should_save_on_exception(trainer)
        ):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def _install_handlers(self, trainer: pl.Trainer) -> None:
        if (
            self._previous
            or not self._on_sigterm
            or threading.current_thread() is not threading.main_thread()
        ):
            return
        self._received = 0
        signals: list[int] = [signal.SIGTERM]
        environment = connector_of(trainer).cluster_environment
        if (
            isinstance(environment, SLURMEnvironment)
            and environment.auto_requeue
            and environment.requeue_signal is not None
        ):
            signals.append(environment.requeue_signal)
        for signum in signals:
            self._previous[signum] = signal.signal(signum, self._record_signal)

    def _restore_handlers(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous = {}

    def _record_signal(self, signum: int, frame: FrameType | None) -> None:
        self._received = max(self._received, 1 if signum == signal.SIGTERM else 2)

    def _end_if_signaled(self, trainer: pl.Trainer) -> None:
        """Save and raise on all ranks if one received a signal."""
        if not self._on_sigterm or not trainer.strategy.reduce_boolean_decision(
            self._received > 0, all=False
        ):
            return
        requeue = trainer.strategy.reduce_boolean_decision(self._received > 1, all=False)
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            if self._repeats_validation:
                _streams(trainer).restore(*self._before_evaluation)
            if requeue:
                trainer.save_checkpoint(requeue_path(trainer))
            elif not self._should_skip_saving_checkpoint(trainer):
                self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
            if isinstance(trainer.strategy, MegatronStrategy):
                trainer.strategy.finish_saving()
        if requeue and trainer.is_global_zero:
            _requeue()
        raise AgreedStop


def _streams(trainer: pl.Trainer) -> ReplicaStreams:
    """Return the random streams of this rank; with a strategy of Lightning's there is one."""
    if isinstance(trainer.strategy, MegatronStrategy):
        return trainer.strategy.ranks.streams
    return ReplicaStreams(trainer.strategy.root_device)


def _requeue() -> None:
    """Make Slurm end this job and queue it again, as an element of its array if it is one."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        failure = subprocess.run(
            ["scontrol", "requeue", job], check=False, capture_output=True, text=True
        )
        text = failure.stderr if failure.returncode else ""
    except OSError as error:
        text = str(error)
    if text:
        warnings.warn(
            f"job {job} is saved and was not queued again ({text.strip()}). Submit it once more.",
            stacklevel=2,
        )
