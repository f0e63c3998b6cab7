"""Report the rank that blocks the other ranks when a batch takes far longer than any before."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Literal, get_args

import lightning.pytorch as pl

from megatron_lightning.callbacks.clock import OwnTime
from megatron_lightning.checkpoint.writing.background import SAVING_THREAD
from megatron_lightning.errors import ConfigError
from megatron_lightning.resilience.failure import end_process
from megatron_lightning.resilience.hangs import Hang, HangMonitor
from megatron_lightning.strategies.megatron import MegatronStrategy

Action = Literal["print", "stop"]
Section = Literal["setup", "save", "validation"]
_FIRST = timedelta(hours=1)


class HangWatch(pl.Callback):
    """Print the position of every rank when no batch ends for ``factor`` times the longest batch,
    or when a setup, a save or a validation takes too long, and stop the job on request.

    The stacks of all ranks, ranks of one stack together, come from a thread of each rank through
    the job's store, while the main threads are blocked. Torch's flight recorder adds the ranks
    behind in a process group. Nothing is installed, and no signal is sent.

    The first batch of training and of validation (connections, compilation) has no limit of its
    own. A batch or section with compilation on a rank never counts as a hang.

    Args:
        factor: Multiple of the longest batch of training, or of validation, and of the longest
            save or validation so far.
        at_least: Lower limit of the allowed time.
        action: ``print``, or ``stop``: all ranks end with exit code 1, and a restarting launcher
            resumes the job.
        sections: Allowed time of a section until one was seen. Afterwards ``factor`` and
            ``at_least`` hold. ``setup`` begins with the callbacks' ``setup`` and ends with the
            first batch of training: it includes the loading of a checkpoint and the sanity check.
            ``save`` ends with the next batch, and in the background with the write. ``validation``
            is one validation as a whole. A section left out has no limit. None: an hour each, after
            which the stacks are only printed, under any ``action``.

    Raises:
        ConfigError: If a value cannot be used.
    """

    def __init__(
        self,
        factor: float = 10.0,
        at_least: timedelta = timedelta(minutes=5),
        action: Action = "print",
        sections: Mapping[Section, timedelta] | None = None,
    ) -> None:
        if factor <= 1 or at_least <= timedelta(0):
            raise ConfigError(
                f"factor is {factor} and at_least is {at_least}: every batch would hang. Set "
                "factor above 1 and at_least to a positive time."
            )
        if action not in get_args(Action):
            raise ConfigError(f"action is {action!r}; it must be one of {get_args(Action)}.")
        self._stops_sections = sections is not None  # nobody has said how long a sound one takes
        sections = dict.fromkeys(get_args(Section), _FIRST) if sections is None else dict(sections)
        for name, limit in sections.items():
            if name not in get_args(Section) or limit <= timedelta(0):
                raise ConfigError(
                    f"sections has {name!r}: {limit}, which is no section with a positive time. "
                    f"Set the sections of {get_args(Section)}, each to a timedelta above 0."
                )
        self.factor = factor
        self.sections = sections
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

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Start watching a fit."""
        if stage != "fit":
            return
        self._stop()
        strategy = trainer.strategy
        self._monitor = HangMonitor(
            trainer.global_rank,
            trainer.world_size,
            factor=self.factor,
            at_least_s=self.at_least.total_seconds(),
            on_hang=partial(self._found, trainer),
            sections={name: limit.total_seconds() for name, limit in self.sections.items()},
            writing_since=partial(getattr, strategy, "writing_since", None),
            writer=SAVING_THREAD,
        )
        self._monitor.enter("setup")
        self._monitor.start()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock of the callback itself."""
        self._own.start()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a batch after a pause."""
        self._leave("save")
        self._begin("training")

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """End a batch. The first ends the setup."""
        self._end("training", trainer)
        self._leave("setup")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Pause until the first batch."""
        self._leave("save")
        self._pause()
        if not trainer.sanity_checking:
            self._enter("validation")

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
        self._leave("validation")
        self._pause()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Pause until the next batch."""
        self._pause()
        self._enter("save")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Pause. The last save may still be on its way."""
        self._pause()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stop watching: the last save is committed."""
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

    def _enter(self, section: Section) -> None:
        if self._monitor is not None:
            self._monitor.enter(section)

    def _leave(self, section: Section) -> None:
        if self._monitor is not None:
            self._monitor.leave(section)

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
        if self.action == "print" or (hang.is_section and not self._stops_sections):
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
