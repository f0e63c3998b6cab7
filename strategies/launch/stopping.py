"""Stops on request: all ranks end a run after the same step, saved.

A request is a signal to any rank, a file, or a time on rank 0's clock. Handlers only record
signals: inside a collective, saving or communicating in a handler would wait forever. Ranks agree
at the end of every optimizer step and of every batch of an evaluation.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from megatron_lightning.checkpoint.format.storage import is_remote
from megatron_lightning.resilience.exit_codes import STOPPED, code_of_stop
from megatron_lightning.resilience.failure import print_message
from megatron_lightning.strategies.launch.failures import AgreedStop
from megatron_lightning.strategies.lightning_internals import (
    connector_of,
    ignore_after_run,
    is_accumulating,
    note_requeue,
    requeue_path,
)

RECORD = "stopped.json"
_FILE_POLL_S = 1.0  # between two looks for the stop file, often on a shared file system


class Reason(IntEnum):
    """Why a run is to stop. Of several reasons the largest holds: a person's file outranks signals,
    which may start the job again.
    """

    NONE = 0
    EXIT_AFTER = 1
    SIGTERM = 2
    REQUEUE = 3
    STOP_FILE = 4


Save = Callable[[pl.Trainer, Reason], str | None]
"""Saves a checkpoint on all ranks and returns the path. None: nothing to save."""


def save_for_requeue(trainer: pl.Trainer, reason: Reason) -> str:
    """Save ``hpc_ckpt_<n>.ckpt``. Lightning resumes from this file by itself."""
    path = requeue_path(trainer)
    trainer.save_checkpoint(path)
    return path


class StopOnRequest(pl.Callback):
    """End a run on all ranks after a request to any rank.

    The file ``stopped.json`` in ``default_root_dir`` records the reason, the checkpoint and the
    step. The next fit removes it. The strategy adds this callback under Slurm, for the requeue
    signal. :class:`megatron_lightning.callbacks.RescueCheckpoint` has a callback for all requests.

    Args:
        save: Saves when a fit stops.
        handles_sigterm: Whether SIGTERM is a request.
        handles_requeue: Whether Slurm's requeue signal is a request.
        stop_file: File whose existence is a request. Removed when the run has stopped, for whatever
            reason, or has trained to its end.
        exit_after: Time from the start of the run to a stop, by rank 0's clock.
        exit_code: Exit code of the processes. Under torchrun the exit code is 0
            (``exit_codes.py``).
    """

    def __init__(
        self,
        save: Save = save_for_requeue,
        *,
        handles_sigterm: bool = False,
        handles_requeue: bool = True,
        stop_file: str | Path | None = None,
        exit_after: timedelta | None = None,
        exit_code: int = STOPPED,
    ) -> None:
        self._save = save
        self._handles_sigterm = handles_sigterm
        self.handles_requeue = handles_requeue
        """Whether Slurm's requeue signal is a request."""
        self._stop_file = None if stop_file is None else Path(stop_file)
        self._exit_after_s = math.inf if exit_after is None else exit_after.total_seconds()
        self._exit_code = exit_code
        self._received = Reason.NONE
        self._previous: dict[int, Any] = {}
        self._num_batches: list[int] = []
        self._started_s = time.monotonic()
        self._looked_s = -math.inf
        self.in_validation = False
        """Whether the batch at hand is of a validation inside a fit."""

    # ---------------------------------------------------------------------------------------- hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Begin to count time, and remove the record of an earlier stop."""
        self._started_s = time.monotonic()
        if stage == TrainerFn.FITTING and trainer.is_global_zero:
            _record_path(trainer).unlink(missing_ok=True)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the signal handlers."""
        self._install_handlers(trainer)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save and end if there is a request. A collective on every optimizer step.

        Raises:
            AgreedStop: On every rank.
        """
        if not is_accumulating(trainer):
            self._end_if_requested(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the signal handlers, and agree with the other ranks on the batches common to all
        ranks.
        """
        self._install_handlers(trainer)
        self._num_batches = _fewest_batches(trainer)

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
        """Save and end after a request. A collective on every batch common to all ranks.

        Raises:
            AgreedStop: On every rank.
        """
        fits = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        is_shared = (
            dataloader_idx < len(self._num_batches)
            and batch_idx < self._num_batches[dataloader_idx]
        )
        if not is_shared or (fits and is_accumulating(trainer)):
            return
        self.in_validation = fits
        self._end_if_requested(trainer)
        self.in_validation = False

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the signal handlers, unless training continues."""
        if trainer.state.fn != TrainerFn.FITTING:
            self.restore_handlers()

    on_test_end = on_predict_end = on_validation_end

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the signal handlers, and remove a stop file of the last moment."""
        self.restore_handlers()
        self._remove_stop_file(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Restore the signal handlers."""
        self.restore_handlers()

    # -------------------------------------------------------------------------------------- signals

    def record_signal(self, signum: int, frame: FrameType | None = None) -> None:
        """Record a signal. For use as a signal handler."""
        reason = Reason.SIGTERM if signum == signal.SIGTERM else Reason.REQUEUE
        self._received = max(self._received, reason)

    def _install_handlers(self, trainer: pl.Trainer) -> None:
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        signals: list[int] = [signal.SIGTERM] if self._handles_sigterm else []
        requeue = requeue_signal(trainer) if self.handles_requeue else None
        if requeue is not None:
            signals.append(requeue)
        for signum in signals:
            self._previous[signum] = signal.signal(signum, self.record_signal)

    def restore_handlers(self) -> None:
        """Restore the replaced handlers."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous = {}

    # ------------------------------------------------------------------------------------------ end

    def _end_if_requested(self, trainer: pl.Trainer) -> None:
        reason = Reason(largest_of_ranks(trainer, self._own_request(trainer)))
        if reason is Reason.NONE:
            return
        self._looked_s = -math.inf  # a file as young as the signal counts
        reason = Reason(largest_of_ranks(trainer, max(reason, self._own_request(trainer))))
        self._received = Reason.NONE
        checkpoint = None
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            checkpoint = self._save(trainer, reason)
            finish_saving = getattr(trainer.strategy, "finish_saving", None)
            if finish_saving is not None:
                finish_saving()
        code = code_of_stop(self._exit_code)
        if trainer.is_global_zero:
            print_message(self._description(trainer, reason, checkpoint, code))
            _write_record(trainer, reason, checkpoint, code)
            self._remove_stop_file(trainer)
            if reason is Reason.REQUEUE:
                _requeue()
        requeue = requeue_signal(trainer)
        if requeue is not None:  # a second signal would kill the process too early
            ignore_after_run(trainer, requeue)
        raise AgreedStop(code)

    def _remove_stop_file(self, trainer: pl.Trainer) -> None:
        if self._stop_file is not None and trainer.is_global_zero:
            self._stop_file.unlink(missing_ok=True)

    def _description(
        self, trainer: pl.Trainer, reason: Reason, checkpoint: str | None, code: int
    ) -> str:
        """Return a line with the request, the step and the checkpoint of a stop."""
        requeue = requeue_signal(trainer) or signal.SIGUSR1
        requests = {
            Reason.EXIT_AFTER: "exit_after",
            Reason.STOP_FILE: f"the file {self._stop_file}",
            Reason.SIGTERM: "SIGTERM",
            Reason.REQUEUE: f"{signal.Signals(requeue).name}, Slurm's signal to save and requeue",
        }
        saved = "without a checkpoint" if checkpoint is None else f"with {checkpoint}"
        return (
            f"{requests[reason]}: the run ends at step {trainer.global_step}, {saved}, "
            f"with exit code {code}"
        )

    def _own_request(self, trainer: pl.Trainer) -> Reason:
        reason = self._received
        if not trainer.is_global_zero:
            return reason
        time_s = time.monotonic()
        if time_s - self._started_s >= self._exit_after_s:
            reason = max(reason, Reason.EXIT_AFTER)
        if self._stop_file is not None and time_s - self._looked_s >= _FILE_POLL_S:
            self._looked_s = time_s
            if self._stop_file.exists():
                reason = max(reason, Reason.STOP_FILE)
        return reason


def requeue_signal(trainer: pl.Trainer) -> int | None:
    """Return Slurm's signal for saving and requeueing this job. None: Slurm sends no signal."""
    environment = connector_of(trainer).cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return environment.requeue_signal


def handle_requeue(trainer: pl.Trainer, undo: ExitStack) -> None:
    """Save and requeue by agreement when Slurm's signal comes, instead of Lightning's handler.

    The user's own callback for stops on request does so, or a callback added for this run.
    """
    if requeue_signal(trainer) is None:
        return
    callbacks: list[pl.Callback] = vars(trainer)["callbacks"]
    owners = (getattr(callback, "stopping", callback) for callback in callbacks)
    stopping = next((o for o in owners if isinstance(o, StopOnRequest) and o.handles_requeue), None)
    if stopping is None:
        stopping = StopOnRequest()
        callbacks.append(stopping)
        undo.callback(callbacks.remove, stopping)
    note_requeue(trainer, stopping.record_signal)


def largest_of_ranks(trainer: pl.Trainer, value: int) -> int:
    """Return the largest ``value`` of all ranks. A collective between hosts, without waiting for a
    device if the backend allows.
    """
    if trainer.world_size == 1 or not dist.is_initialized():
        return int(value)
    on_host = "cpu:" in dist.get_backend_config()
    device = torch.device("cpu") if on_host else trainer.strategy.root_device
    tensor = torch.tensor(int(value), device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return int(tensor)


def _fewest_batches(trainer: pl.Trainer) -> list[int]:
    counts = {
        RunningStage.SANITY_CHECKING: trainer.num_sanity_val_batches,
        RunningStage.VALIDATING: trainer.num_val_batches,
        RunningStage.TESTING: trainer.num_test_batches,
        RunningStage.PREDICTING: trainer.num_predict_batches,
    }
    num_batches = counts[trainer.state.stage] if trainer.state.stage is not None else 0
    of_ranks: list[Any] = [num_batches if isinstance(num_batches, list) else [num_batches]]
    if dist.is_initialized():
        of_ranks *= dist.get_world_size()
        dist.all_gather_object(of_ranks, of_ranks[0])
    fewest = [min(numbers) for numbers in zip(*of_ranks, strict=True)]
    return [0 if math.isinf(number) else int(number) for number in fewest]


def _record_path(trainer: pl.Trainer) -> Path:
    return Path(str(trainer.default_root_dir)) / RECORD


def _write_record(trainer: pl.Trainer, reason: Reason, checkpoint: str | None, code: int) -> None:
    """Record a stop for scripts. Scripts may not see the exit code, since torchrun exits with its
    own code.
    """
    record = {
        "reason": reason.name.lower(),
        "checkpoint": checkpoint,
        "global_step": trainer.global_step,
        "exit_code": code,
    }
    path = _record_path(trainer)
    if is_remote(str(trainer.default_root_dir)):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{json.dumps(record)}\n")


def _requeue() -> None:
    """Make Slurm end this job and queue the job again, as an array element for array jobs."""
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
