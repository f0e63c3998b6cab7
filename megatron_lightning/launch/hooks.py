"""Functions of the strategy, called by a launcher while a rank starts and ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from megatron_lightning.resilience.failure_watch import FailureWatch


@dataclass(frozen=True, kw_only=True)
class LaunchHooks:
    """Functions of the strategy for a launcher. Can be pickled with the launcher."""

    before_launch: Callable[[pl.Trainer | None, pl.LightningDataModule | None], None]
    """Raises ConfigError for unusable modules or data, before any process is started."""
    note_checkpoint: Callable[[pl.Trainer | None, str], None]
    """Records the checkpoint to load, before the run begins: ``ckpt_path``, or empty."""
    prepare_logs: Callable[[pl.Trainer, tuple[Any, ...], Mapping[str, Any]], None]
    """Lets "last" look for checkpoints in the folder of the log of the start before."""
    failure_watch: Callable[[], FailureWatch | None]
    """Returns the watch of this rank. None outside a run and on one rank."""
    write_logs: Callable[[], None]
    """Writes buffered values of loggers, before a process is killed."""
    full_module_state: Callable[[], dict[str, Any] | None]
    """Returns the state of the full module after ``fit``. All ranks call this."""
