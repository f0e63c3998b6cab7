"""Loggers, warnings, and the summary of a module."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.loggers import Logger


def name_of_log(logger: Logger) -> str | None:
    """Return the name chosen for a log, without beginning a run.

    The ``name`` of MLflow's logger is the id of the experiment, and reading ``name`` begins a run.
    """
    attributes = vars(logger)
    return attributes["_experiment_name"] if "_mlflow_client" in attributes else logger.name


def has_version(logger: Logger) -> bool:
    """Whether a logger's version was set, or cannot be set here."""
    return vars(logger).get(_name_of_version(logger), "") is not None


def has_experiment(logger: Logger) -> bool:
    """Whether a logger has begun to log."""
    return vars(logger).get("_experiment") is not None


def set_version(logger: Logger, version: Any) -> None:
    """Make a logger without a version continue the log of an earlier run.

    Args:
        logger: Has written nothing yet.
        version: The logger's ``version`` in the earlier run: a number or name of a folder, or an id
            of W&B or MLflow. None: begin a new log.
    """
    attributes = vars(logger)
    attributes[_name_of_version(logger)] = version
    if "_wandb_init" in attributes:
        attributes["_wandb_init"].update(id=version, resume="allow")


def _name_of_version(logger: Logger) -> str:
    """Return the attribute of a logger that holds the version."""
    if "_wandb_init" in vars(logger):
        return "_id"
    return "_run_id" if "_mlflow_client" in vars(logger) else "_version"


def hide_sync_advice() -> Callable[[], None]:
    """Hide Lightning's advice to log with ``sync_dist=True``, given whenever process groups exist.
    Return the undo.
    """
    return _hide(r"It is recommended to use `self\.log", PossibleUserWarning)


def hide_repeated_data() -> Callable[[], None]:
    """Hide Lightning's warning of data that come again after a resume, for data that continue.
    Return the undo.
    """
    # Lightning looks for state_dict on loaders, not on samplers.
    return _hide("You're resuming from a checkpoint that ended before the epoch ended", Warning)


def _hide(message: str, category: type[Warning]) -> Callable[[], None]:
    warnings.filterwarnings("ignore", message, category)
    hidden = warnings.filters[0]

    def undo() -> None:
        if hidden in warnings.filters:
            warnings.filters.remove(hidden)  # type: ignore[attr-defined]

    return undo


class FullSummary:
    """Lightning's summary of a module at one time. The summary does not keep the module's layers
    alive.

    Args:
        callback: Makes the summary.
        trainer: The module's.
        module: The LightningModule.
    """

    def __init__(
        self, callback: ModelSummary, trainer: pl.Trainer, module: pl.LightningModule
    ) -> None:
        summary = callback._summary(trainer, module)
        self._data = summary._get_summary_data()
        self.total_parameters = summary.total_parameters
        self.trainable_parameters = summary.trainable_parameters
        self.model_size = summary.model_size
        self.total_training_modes = summary.total_training_modes

    def _get_summary_data(self) -> Any:
        return self._data


def replace_summary(
    callback: ModelSummary, summary: FullSummary, summarize: Callable[..., None]
) -> Callable[[], None]:
    """Show ``summary`` in place of the callback's own, through ``summarize``. Return the undo."""
    vars(callback).update(_summary=lambda *_: summary, summarize=summarize)

    def undo() -> None:
        for name in ("_summary", "summarize"):
            vars(callback).pop(name, None)

    return undo
