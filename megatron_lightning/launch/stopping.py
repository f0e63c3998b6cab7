"""Stops on request: all ranks end a run after the same step, saved.

A request is a signal to any rank, a file, or a time on rank 0's clock
(``resilience/lifecycle/stop_requests.py``). Ranks agree at the end of every optimizer step and of
every batch of an evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from megatron_lightning.checkpoint.format.storage import is_remote
from megatron_lightning.lightning_internals.checkpoints import requeue_path
from megatron_lightning.lightning_internals.loops import is_accumulating
from megatron_lightning.lightning_internals.signals import ignore_after_run, note_requeue
from megatron_lightning.lightning_internals.trainer import connector_of
from megatron_lightning.resilience.exit_codes import STOPPED, code_of_stop
from megatron_lightning.resilience.failure import print_message
from megatron_lightning.resilience.lifecycle.stop_record import remove_stop, requeue_job, write_stop
from megatron_lightning.resilience.lifecycle.stop_requests import Reason, StopRequests
from megatron_lightning.step.agreed_stop import AgreedStop

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
        self.handles_requeue = handles_requeue
        """Whether Slurm's requeue signal is a request."""
        self._requests = StopRequests(
            handles_sigterm=handles_sigterm, stop_file=stop_file, exit_after=exit_after
        )
        self._exit_code = exit_code
        self._num_batches: list[int] = []
        self.in_validation = False
        """Whether the batch at hand is of a validation inside a fit."""

    # ---------------------------------------------------------------------------------------- hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Begin to count time, and remove the record of an earlier stop."""
        self._requests.begin()
        if stage == TrainerFn.FITTING and trainer.is_global_zero:
            remove_stop(_folder(trainer))

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
        if trainer.is_global_zero:
            self._requests.remove_file()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Restore the signal handlers."""
        self.restore_handlers()

    # -------------------------------------------------------------------------------------- signals

    def record_signal(self, signum: int, frame: FrameType | None = None) -> None:
        """Record a signal. For use as a signal handler."""
        self._requests.record_signal(signum, frame)

    def _install_handlers(self, trainer: pl.Trainer) -> None:
        requeue = requeue_signal(trainer) if self.handles_requeue else None
        self._requests.install_handlers(requeue)

    def restore_handlers(self) -> None:
        """Restore the replaced handlers."""
        self._requests.restore_handlers()

    # ------------------------------------------------------------------------------------------ end

    def _end_if_requested(self, trainer: pl.Trainer) -> None:
        is_first = trainer.is_global_zero
        reason = largest_of_ranks(trainer, self._requests.current(is_first=is_first))
        if reason == Reason.NONE:
            return
        self._requests.look_again()
        own = self._requests.current(is_first=is_first)
        reason = Reason(largest_of_ranks(trainer, max(reason, own)))
        self._requests.forget()
        checkpoint = self._saved(trainer, reason)
        requeue, code = requeue_signal(trainer), code_of_stop(self._exit_code)
        if is_first:
            saved = "without a checkpoint" if checkpoint is None else f"with {checkpoint}"
            step = trainer.global_step
            print_message(
                f"{self._requests.describe(reason, requeue)}: the run ends at step {step}, "
                f"{saved}, with exit code {code}"
            )
            if not is_remote(str(trainer.default_root_dir)):
                folder = _folder(trainer)
                write_stop(folder, reason, checkpoint=checkpoint, step=step, exit_code=code)
            self._requests.remove_file()
            if reason is Reason.REQUEUE:
                requeue_job()
        if requeue is not None:  # a second signal would kill the process too early
            ignore_after_run(trainer, requeue)
        raise AgreedStop(code)

    def _saved(self, trainer: pl.Trainer, reason: Reason) -> str | None:
        """Save a fit and return the committed checkpoint. None: nothing to save."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return None
        checkpoint = self._save(trainer, reason)
        finish_saving = getattr(trainer.strategy, "finish_saving", None)
        if finish_saving is not None:
            finish_saving()
        return checkpoint


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


def _folder(trainer: pl.Trainer) -> Path:
    return Path(str(trainer.default_root_dir))
