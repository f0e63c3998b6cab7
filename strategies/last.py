"""``ckpt_path="last"`` where checkpoints are in an object store: Lightning looks for local files only.

The launcher sees the arguments of ``fit`` and its kin before Lightning looks, and puts the URL in place of "last".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from megatron_lightning.checkpoint.commit import MANIFEST, is_committed
from megatron_lightning.checkpoint.storage import folder_of, is_remote, list_folders


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


def _found(trainer: pl.Trainer) -> Iterator[tuple[str, float]]:
    """Yield (path or URL, when it was saved) of every committed checkpoint that a callback calls its last."""
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        directory = str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]
        try:
            folders = list_folders(directory)
        except FileNotFoundError:
            continue
        pattern = re.compile(rf"{re.escape(callback.CHECKPOINT_NAME_LAST)}(-.*)?{re.escape(callback.FILE_EXTENSION)}")
        for path in folders:
            if pattern.fullmatch(PurePosixPath(path).name) and is_committed(path):
                yield path, folder_of(path).modified(MANIFEST) or 0.0
