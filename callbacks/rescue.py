"""Save what would be lost: on SIGTERM, on an exception, and every so many minutes."""

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
from megatron_lightning.parallel.context import AxisGroup
from megatron_lightning.parallel.replica_rng import ReplicaRng
from megatron_lightning.strategies.checkpoint_hooks import MegatronCheckpoints
from megatron_lightning.strategies.failure import AgreedStop
from megatron_lightning.strategies.lightning_internals import connector_of, is_accumulating, requeue_path


class RescueCheckpoint(ModelCheckpoint):
    """Keeps one checkpoint, ``rescue.ckpt``, for going on after an interruption; ``ckpt_path="last"`` finds it.

    It stands beside the run's other ``ModelCheckpoint`` callbacks; ``"last"`` is the newest of all. Each save replaces the one
    before when it is complete.

    * SIGTERM, as Slurm, Kubernetes and torchrun send it before they end a job, to any rank: all ranks finish the optimizer step
      or the batch of validation, save, and leave with ``AgreedStop``, a ``SIGTERMException`` that counts as nobody's failure.
      A run that goes on from there repeats the validation that was cut short. The sanity check, ``validate``, ``test`` and
      ``predict`` just end. Lightning's own handling of the signal, which communicates inside of the handler, is off.
    * Slurm's requeue signal (``SLURMEnvironment``; SIGUSR1): all ranks save ``hpc_ckpt_<n>.ckpt`` in ``default_root_dir``, from
      which Lightning goes on without being told to; rank 0 has the job queued again, and all leave.
    * An exception that all ranks meet, Ctrl-C among them: they save what they have. One that only some ranks meet cannot be
      saved (the others have the rest of the model); the last save in time stands.
    * Every ``every_n_minutes``, by rank 0's clock.

    Args:
        dirpath: Folder; None: as for ``ModelCheckpoint``.
        every_n_minutes: Minutes between two saves in time; None: none of those.
        on_sigterm: Whether to save on SIGTERM and on Slurm's requeue signal.
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
        self._on_sigterm, self._received = on_sigterm, 0
        self._previous: dict[int, Any] = {}
        self._num_batches: list[int] = []
        self._before_evaluation: list[Tensor] = []
        self._repeats_validation = False

    # ------------------------------------------------------------------------------------------------------- training

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over the signals."""
        super().on_train_start(trainer, pl_module)
        self._take_over(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is time or a rank was told to end; a collective on every batch.

        Raises:
            AgreedStop: On every rank, after saving.
        """
        if is_accumulating(trainer):
            return  # half of an optimizer step: its gradients are not part of a checkpoint
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._before_evaluation = ReplicaRng(trainer.strategy.root_device).state()
        self._end_if_told(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the signals back; a run that ended well needs no rescue."""
        self._give_back()

    # ----------------------------------------------------------------------------------------------------- evaluation

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over the signals, and agree with the other ranks on the batches that all of them have."""
        self._begin_evaluation(trainer)

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
        """Save and leave if a rank was told to end; a collective on every batch that all ranks have.

        Raises:
            AgreedStop: On every rank.
        """
        fitting = trainer.state.fn == TrainerFn.FITTING
        is_shared = dataloader_idx < len(self._num_batches) and batch_idx < self._num_batches[dataloader_idx]
        if not is_shared or (fitting and not trainer.sanity_checking and is_accumulating(trainer)):
            return
        self._repeats_validation = fitting and not trainer.sanity_checking
        self._end_if_told(trainer)
        self._repeats_validation = False

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the signals back, unless training goes on."""
        super().on_validation_end(trainer, pl_module)
        if trainer.state.fn != TrainerFn.FITTING:
            self._give_back()

    on_test_end = on_predict_end = on_validation_end

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Let a run that goes on from the middle of a validation begin that anew."""
        if self._repeats_validation:
            progress = type(trainer.fit_loop.epoch_loop.val_loop.batch_progress)()
            progress.increment_ready()
            progress.increment_started()  # Lightning goes back to a validation in whose first step it was
            checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"] = progress.state_dict()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Save, if all ranks are here and it has not been done for this step."""
        self._give_back()
        told = isinstance(exception, AgreedStop)  # what was to be saved is saved
        if not told and trainer.state.fn == TrainerFn.FITTING and self._should_save_on_exception(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    # -------------------------------------------------------------------------------------------------------- signals

    def _take_over(self, trainer: pl.Trainer) -> None:
        if self._previous or not self._on_sigterm or threading.current_thread() is not threading.main_thread():
            return
        self._received = 0
        requeue = _requeue_signal(trainer)
        for signum in (signal.SIGTERM, requeue) if requeue is not None else (signal.SIGTERM,):
            self._previous[signum] = signal.signal(signum, self._note)

    def _give_back(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous = {}

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._received = max(self._received, 1 + (signum != signal.SIGTERM))

    def _begin_evaluation(self, trainer: pl.Trainer) -> None:
        self._take_over(trainer)
        counts = {
            RunningStage.SANITY_CHECKING: trainer.num_sanity_val_batches,
            RunningStage.VALIDATING: trainer.num_val_batches,
            RunningStage.TESTING: trainer.num_test_batches,
            RunningStage.PREDICTING: trainer.num_predict_batches,
        }
        mine = counts[trainer.state.stage] if trainer.state.stage is not None else 0
        mine = mine if isinstance(mine, list) else [mine]
        fewest = [min(numbers) for numbers in zip(*_all_ranks().all_gather_object(mine), strict=True)]
        self._num_batches = [0 if math.isinf(number) else int(number) for number in fewest]

    def _end_if_told(self, trainer: pl.Trainer) -> None:
        """Save and raise on all ranks if one was told to end."""
        if not self._on_sigterm or not trainer.strategy.reduce_boolean_decision(self._received > 0, all=False):
            return
        requeue = trainer.strategy.reduce_boolean_decision(self._received > 1, all=False)
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            if self._repeats_validation:
                ReplicaRng(trainer.strategy.root_device).set_state(self._before_evaluation)
            if requeue:
                trainer.save_checkpoint(requeue_path(trainer))
            elif not self._should_skip_saving_checkpoint(trainer):
                self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
            if isinstance(trainer.strategy, MegatronCheckpoints):
                trainer.strategy.finish_saving()
        if requeue and trainer.is_global_zero:
            _queue_again()
        raise AgreedStop


def _requeue_signal(trainer: pl.Trainer) -> int | None:
    environment = connector_of(trainer).cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return environment.requeue_signal
    return None


def _queue_again() -> None:
    """Have Slurm end this job and queue it again, as an element of its array if it is one."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        failure = subprocess.run(["scontrol", "requeue", job], check=False, capture_output=True, text=True)
        text = failure.stderr if failure.returncode else ""
    except OSError as error:
        text = str(error)
    if text:
        warnings.warn(f"job {job} is saved and was not queued again ({text.strip()}). Submit it once more.", stacklevel=2)


def _all_ranks() -> AxisGroup:
    if not dist.is_initialized():
        return AxisGroup("world", (0,), 0, None)
    return AxisGroup("world", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
