"""Report the rank that blocks the other ranks when a batch takes far longer than any before."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any, Literal, get_args

import lightning.pytorch as pl

from megatron_lightning.callbacks.clock import OwnTime
from megatron_lightning.errors import ConfigError
from megatron_lightning.resilience.failure import end_process
from megatron_lightning.resilience.hangs import Hang, HangMonitor
from megatron_lightning.strategies.megatron import MegatronStrategy

Action = Literal["print", "stop"]


class HangWatch(pl.Callback):
    """Print the position of every rank when no batch ends for ``factor`` times the longest batch,
    and stop the job on request.

    The stacks of all ranks, ranks of one stack together, come from a thread of each rank through
    the job's store, while the main threads are blocked. Torch's flight recorder adds the ranks
    behind in a process group. Nothing is installed, and no signal is sent.

    The first batch of training and of validation (connections, compilation), saves, and the time
    between training and validation have no limit. A batch with compilation on a rank never counts
    as a hang.

    Args:
        factor: Multiple of the longest batch of training, or of validation.
        at_least: Lower limit of the allowed time.
        action: ``print``, or ``stop``: all ranks end with exit code 1, and a restarting launcher
            resumes the job.

    Raises:
        ConfigError: If a value cannot be used.
    """

    def __init__(
        self,
        factor: float = 10.0,
        at_least: timedelta = timedelta(minutes=5),
        action: Action = "print",
    ) -> None:
        if factor <= 1 or at_least <= timedelta(0):
            raise ConfigError(
                f"factor is {factor} and at_least is {at_least}: every batch would hang. Set "
                "factor above 1 and at_least to a positive time."
            )
        if action not in get_args(Action):
            raise ConfigError(f"action is {action!r}; it must be one of {get_args(Action)}.")
        self.factor = factor
        self.at_least = at_least
        self.action = action
        self.hangs: list[Hang] = []
        """Hangs printed by this rank."""
        self._monitor: HangMonitor | None = None
        self._own = OwnTime()

    @property
    def overhead(self) -> float:
        """Share of the training time spent in the hooks."""
        return self._own.share

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_monitor": None}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start watching."""
        self._stop()
        self._own.start()
        self._monitor = HangMonitor(
            trainer.global_rank,
            trainer.world_size,
            factor=self.factor,
            at_least_s=self.at_least.total_seconds(),
            on_hang=partial(self._found, trainer),
        )
        self._monitor.start()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a batch after a pause."""
        self._begin("training")

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """End a batch."""
        self._end("training", trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Pause until the first batch."""
        self._pause()

    def on_validation_batch_start(  # Lightning's signature
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Begin a batch after a pause."""
        self._begin("validation")

    def on_validation_batch_end(  # noqa: PLR0917  # Lightning's signature
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """End a batch."""
        self._end("validation", trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Pause until the next batch."""
        self._pause()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Pause until the next batch."""
        self._pause()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop watching."""
        self._stop()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Stop watching."""
        self._stop()

    def _begin(self, activity: str) -> None:
        with self._own.counted():
            if self._monitor is not None:
                self._monitor.begin(activity)

    def _end(self, activity: str, trainer: pl.Trainer) -> None:
        with self._own.counted():
            if self._monitor is not None:
                self._monitor.end(activity, trainer.global_step)

    def _pause(self) -> None:
        if self._monitor is not None:
            self._monitor.pause()

    def _stop(self) -> None:
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None

    def _found(self, trainer: pl.Trainer, hang: Hang) -> None:
        """Follow a hang. Called from the monitor's thread of one rank."""
        self.hangs.append(hang)
        if self.action == "print":
            return
        strategy = trainer.strategy
        watch = strategy.ranks.failure_watch if isinstance(strategy, MegatronStrategy) else None
        if watch is not None:  # threads of the watch end the other ranks
            watch.report_child(
                hang.suspects[0] if hang.suspects else trainer.global_rank, "it hangs"
            )
        end_process(partial(_finalize, trainer))


def _finalize(trainer: pl.Trainer) -> None:
    for logger in trainer.loggers:
        logger.finalize("failed")
