"""Checkpoints that the Trainer makes, finds and reads."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core import saving
from lightning.pytorch.loggers import Logger

_GUARDS = ("assembly.state.saving_guard", "guards.part_saving")


def trainer_state(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the dict handed to the strategy by ``trainer.save_checkpoint``."""
    return dict(trainer._checkpoint_connector.dump_checkpoint(weights_only=False))


def chosen_checkpoint(trainer: pl.Trainer, path: str) -> str | None:
    """Return the checkpoint to be loaded by the Trainer for a ``ckpt_path`` such as "last". None:
    the Trainer loads nothing.

    Args:
        trainer: The Trainer.
        path: The argument. Empty if the user left the argument out.
    """
    connector, fn = trainer._checkpoint_connector, trainer.state.fn
    if fn is None or path not in ("", "best", "last", "hpc"):
        return path or None
    if not path and connector._user_managed:
        return None if trainer.ckpt_path is None else str(trainer.ckpt_path)
    with warnings.catch_warnings():  # repeated when the Trainer asks
        warnings.simplefilter("ignore")
        try:
            # As with a model: without a model Lightning itself announces "best".
            path_found = connector._parse_ckpt_path(fn, path or None, True, True)
        except (ValueError, MisconfigurationException):
            return None  # there is no such checkpoint, as the Trainer will say
    return None if path_found is None else str(path_found)


def requeue_path(trainer: pl.Trainer) -> str:
    """Return the next ``hpc_ckpt_<n>.ckpt``, the file sought by a job that Slurm has queued
    again.
    """
    return str(trainer._checkpoint_connector.hpc_save_path(str(trainer.default_root_dir)))


def checkpoint_folder(callback: ModelCheckpoint, trainer: pl.Trainer) -> str:
    """Return the folder of ``callback``. ``callback.dirpath`` is None until ``setup`` has run."""
    return str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]


class SavesBeside(ModelCheckpoint):
    """A ModelCheckpoint that saves beside the run's other checkpoints, unless ``dirpath`` is set.

    Lightning gives every callback without ``dirpath`` the folder of the log, and the next start
    does not know that folder.
    """

    def _ModelCheckpoint__resolve_ckpt_dir(self, trainer: pl.Trainer) -> str:
        """Return the folder. Called by ``setup``, and in the search for "last" before ``setup``."""
        for other in () if self.dirpath is not None else trainer.checkpoint_callbacks:
            if not isinstance(other, ModelCheckpoint) or isinstance(other, SavesBeside):
                continue
            if other.dirpath is not None and self._takes(str(other.dirpath)):
                return str(other.dirpath)
        return str(super()._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[misc]

    def _takes(self, folder: str) -> bool:
        """Return whether a folder can hold the checkpoint."""
        return True


def uploads_checkpoints(logger: Logger) -> bool:
    """Whether a logger is asked to upload the checkpoints of ModelCheckpoint, for loggers with this
    option.
    """
    # A DummyLogger has every attribute.
    return getattr(logger, "_log_model", False) in (True, "all")


def saves_or_loads() -> bool:
    """Whether Lightning makes or reads a checkpoint, or Lightning or this package is the caller.

    The caller is the first frame outside of torch. A user's hook during the making of a checkpoint
    is recognized further up the stack. Lightning announces neither case to the module or the
    strategy, and only a warning depends on the answer. So a look at the stack is enough.
    """
    frame, caller = sys._getframe(1), ""
    above: FrameType | None = frame
    while above is not None:
        module = str(above.f_globals.get("__name__"))
        if module.endswith("connectors.checkpoint_connector"):
            return True
        is_between = module in {__name__, "functools"} or module.startswith("torch.")
        if not caller and not (is_between or module.endswith(_GUARDS)):
            caller = module
        above = above.f_back
    return caller.startswith(("lightning.", "pytorch_lightning.", "megatron_lightning."))


class _OfFolder(dict[str, Any]):
    """The checkpoint in a directory."""

    folder: str


def read_folders(
    read: Callable[[Any], AbstractContextManager[Any]],
    check: Callable[[Mapping[Any, Any], type, str], None],
    load_module: Callable[[Mapping[Any, Any], Callable[..., Any]], Any],
) -> None:
    """Make ``load_from_checkpoint`` read directories, opened as files by ``read``, for the life of
    the process. The method is a classmethod of the user's class, and Lightning has no hook between
    the method and the open file. ``check`` sees a directory's checkpoint, with the user's class and
    the directory, before Lightning makes the object. ``load_module`` sees the checkpoint of a
    module, also in a plain file, and calls Lightning's function with changed options.
    """
    original, original_state = vars(saving)["pl_load"], vars(saving)["_load_state"]
    if getattr(original, "reads_folders", False):
        return

    def load(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if not (isinstance(path, str | os.PathLike) and os.path.isdir(path)):
            return original(path, map_location=map_location, weights_only=weights_only)
        with read(path) as file:
            state = original(file, map_location=map_location, weights_only=weights_only)
        checkpoint = _OfFolder(state)
        checkpoint.folder = str(path)
        return checkpoint

    def load_state(cls: type, checkpoint: Any, *args: Any, **settings: Any) -> Any:
        if isinstance(checkpoint, _OfFolder):
            check(checkpoint, cls, checkpoint.folder)
        if settings.get("strict") is False or not issubclass(cls, pl.LightningModule):
            return original_state(cls, checkpoint, *args, **settings)

        def load_object(**changed: Any) -> Any:
            return original_state(cls, checkpoint, *args, **{**settings, **changed})

        return load_module(checkpoint, load_object)

    vars(load)["reads_folders"] = True
    vars(saving).update(pl_load=load, _load_state=load_state)
