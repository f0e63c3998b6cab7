"""Checkpoints that Lightning looks for by itself, where it would not find them.

``ckpt_path="last"``: it looks for local files only. The launcher sees the arguments of ``fit`` and its kin before that, and
puts the URL of a checkpoint in an object store in place of "last". After a requeue by Slurm Lightning takes the largest number
in any name with ``hpc_ckpt_``, and so the leftover of a save that was killed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from megatron_lightning.checkpoint.commit import MANIFEST, is_committed
from megatron_lightning.checkpoint.storage import folder_of, is_plain_file, is_remote, list_folders
from megatron_lightning.errors import MissingCheckpointError
from megatron_lightning.strategies.lightning_internals import checkpoint_folder

_REQUEUED = re.compile(r"hpc_ckpt_(\d+)\.ckpt")


def with_last_found(
    trainer: pl.Trainer | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``fit`` and its kin with a URL instead of "last", if a callback's checkpoints are at one.

    Args:
        trainer: Has the callbacks.
        args: Positional arguments.
        kwargs: Named arguments.

    Returns:
        The arguments, unchanged if "last" is not among them, or nothing is there to go on from.
    """
    given = (*args, *kwargs.values())
    if trainer is None or not any(isinstance(value, str) and value == "last" for value in given):
        return args, dict(kwargs)
    found = dict(_found(trainer))
    if not any(map(is_remote, found)):
        return args, dict(kwargs)
    newest = max(found, key=lambda path: found[path])

    def replaced(value: Any) -> Any:
        return newest if isinstance(value, str) and value == "last" else value

    return tuple(map(replaced, args)), {name: replaced(value) for name, value in kwargs.items()}


def check_named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check that something stands at the ``ckpt_path`` among the arguments of ``fit`` and its kin.

    Raises:
        MissingCheckpointError: If nothing does, before any process is started. Keywords and object stores are left for later.
    """
    named = kwargs.get("ckpt_path", next((value for value in args if isinstance(value, (str, PathLike))), None))
    path = "" if named is None else str(named)
    if path in ("", "best", "last", "hpc") or path.startswith("registry") or is_remote(path):
        return
    if not Path(committed_requeue(path)).exists():
        raise MissingCheckpointError.at(path)


def _found(trainer: pl.Trainer) -> Iterator[tuple[str, float]]:
    """Yield (path or URL, when it was saved) of every committed checkpoint that a callback calls its last."""
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        directory = checkpoint_folder(callback, trainer)
        try:
            folders = list_folders(directory)
        except FileNotFoundError:
            continue
        pattern = re.compile(rf"{re.escape(callback.CHECKPOINT_NAME_LAST)}(-.*)?{re.escape(callback.FILE_EXTENSION)}")
        for path in folders:
            if pattern.fullmatch(PurePosixPath(path).name) and is_committed(path):
                yield path, folder_of(path).modified(MANIFEST) or 0.0


def committed_requeue(path: str) -> str:
    """Return the newest ``hpc_ckpt_<n>.ckpt`` that was committed if ``path`` is such a name with nothing behind it."""
    folder, _, name = path.rpartition("/")
    if not _REQUEUED.fullmatch(name) or is_committed(path) or is_plain_file(path):
        return path
    try:
        found = [(_numbered(other), other) for other in list_folders(folder or ".")]
    except FileNotFoundError:
        return path
    return max(((int(number[1]), other) for number, other in found if number and is_committed(other)), default=(0, path))[1]


def _numbered(path: str) -> re.Match[str] | None:
    return _REQUEUED.fullmatch(PurePosixPath(path).name)
