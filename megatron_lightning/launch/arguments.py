"""The arguments of ``fit``, ``validate``, ``test`` and ``predict`` in the launcher, before
Lightning reads the arguments.

``ckpt_path="last"``: Lightning looks for local files of callbacks only, so the URL of a checkpoint
in an object store replaces "last". Under Slurm a newer checkpoint of a requeued job does, too. A
local path is checked before any process is started.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from megatron_lightning.checkpoint.format.storage import folder_of, is_remote, list_folders
from megatron_lightning.checkpoint.requeue import committed_requeue, newest_requeue
from megatron_lightning.checkpoint.writing.commit import is_committed
from megatron_lightning.errors import MissingCheckpointError
from megatron_lightning.file_names import MANIFEST
from megatron_lightning.launch.hooks import LaunchHooks
from megatron_lightning.lightning_internals.checkpoints import checkpoint_folder, chosen_checkpoint


def checked_arguments(
    trainer: pl.Trainer | None, args: tuple[Any, ...], kwargs: Mapping[str, Any], hooks: LaunchHooks
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Check the arguments as far as possible before a process is started. Return the arguments,
    with "last" resolved.

    Raises:
        ConfigError, MissingCheckpointError: If module, data or checkpoint cannot be used.
    """
    if trainer is not None:
        hooks.prepare_logs(trainer, args, kwargs)
    args, kwargs = with_last_checkpoint(trainer, args, kwargs)
    path = check_checkpoint_path(args, kwargs)
    hooks.note_checkpoint(trainer, path)
    hooks.before_launch(trainer, data_module_of(args, kwargs))
    return args, kwargs


def with_last_checkpoint(
    trainer: pl.Trainer | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with a path instead of "last", if Lightning would find an older
    checkpoint or none: the newest URL of a callback, or ``hpc_ckpt_<n>.ckpt``.
    """
    values = (*args, *kwargs.values())
    if trainer is None or not any(isinstance(value, str) and value == "last" for value in values):
        return args, dict(kwargs)
    checkpoints = dict(_found(trainer))
    requeue = None
    # As Lightning without "last": elsewhere the file in a shared folder is another run's.
    if trainer.state.fn == TrainerFn.FITTING and SLURMEnvironment.detect():
        requeue = newest_requeue(str(trainer.default_root_dir))
    if not any(map(is_remote, checkpoints)):
        if requeue is None:
            return args, dict(kwargs)
        chosen = chosen_checkpoint(trainer, "last")  # plain files and copies on local disks, too
        checkpoints = {} if chosen is None else {chosen: _saved_at(chosen)}
    if requeue is not None:
        checkpoints[requeue] = _saved_at(requeue)
    newest = max(checkpoints, key=lambda path: checkpoints[path])

    def replaced(value: Any) -> Any:
        return newest if isinstance(value, str) and value == "last" else value

    return tuple(map(replaced, args)), {name: replaced(value) for name, value in kwargs.items()}


def check_checkpoint_path(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Check that the ``ckpt_path`` among the arguments exists. Return the path. Keywords such as
    "best" and object stores are left for later.
    """
    given = kwargs.get(
        "ckpt_path", next((value for value in args if isinstance(value, (str, PathLike))), None)
    )
    path = "" if given is None else str(given)
    if path in ("", "best", "last", "hpc") or path.startswith("registry") or is_remote(path):
        return path
    if not Path(committed_requeue(path)).exists():
        raise MissingCheckpointError.at(path)
    return path


def data_module_of(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> pl.LightningDataModule | None:
    """Return the data module among the arguments. The Trainer knows the data module only after the
    launch.
    """
    values = (*args, *kwargs.values())
    return next(
        (argument for argument in values if isinstance(argument, pl.LightningDataModule)), None
    )


def _found(trainer: pl.Trainer) -> Iterator[tuple[str, float]]:
    """Yield (path or URL, time of the save) of every committed "last" checkpoint of a callback."""
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        directory = checkpoint_folder(callback, trainer)
        try:
            folders = list_folders(directory)
        except FileNotFoundError:
            continue
        pattern = re.compile(
            rf"{re.escape(callback.CHECKPOINT_NAME_LAST)}(-.*)?{re.escape(callback.FILE_EXTENSION)}"
        )
        for path in folders:
            if pattern.fullmatch(PurePosixPath(path).name) and is_committed(path):
                yield path, _saved_at(path)


def _saved_at(path: str) -> float:
    """Return the time of a save."""
    if not is_remote(path) and not is_committed(path):
        return Path(path).stat().st_mtime
    return folder_of(path).modified(MANIFEST) or 0.0
