"""Functions of the strategy that a launcher calls while it starts and ends a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from megatron_lightning.resilience.failure import FailureWatch


@dataclass(frozen=True, kw_only=True)
class LaunchHooks:
    """Functions of the strategy that a launcher calls; they can be pickled with it."""

    before_launch: Callable[[pl.Trainer | None, pl.LightningDataModule | None], None]
    """Raises ConfigError for a module or data that cannot run, before any process is started."""
    note_checkpoint: Callable[[pl.Trainer | None, str], None]
    """Records which checkpoint the run will load, before it begins: ``ckpt_path``, or empty."""
    prepare_logs: Callable[[pl.Trainer, tuple[Any, ...], Mapping[str, Any]], None]
    """Makes loggers continue the logs of the run that the arguments of a ``fit`` resume."""
    failure_watch: Callable[[], FailureWatch | None]
    """Returns the watch of this rank; None outside a run and on one rank."""
    write_logs: Callable[[], None]
    """Writes what loggers hold, before a process is killed."""
    full_module_state: Callable[[], dict[str, Any] | None]
    """Returns the state of the full module after ``fit``; all ranks call it."""
