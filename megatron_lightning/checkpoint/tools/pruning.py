"""Find unneeded entries of a folder of checkpoints: leftovers of interrupted saves, and old
checkpoints by rule.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lightning.checkpoint.format.files import release, try_lock
from megatron_lightning.checkpoint.format.storage import (
    Folder,
    folder_of,
    is_remote,
    list_folders,
    local_path,
)
from megatron_lightning.checkpoint.listing import (
    LEFTOVER,
    StoredCheckpoint,
    last_part,
    list_checkpoints,
    read_manifest,
)
from megatron_lightning.checkpoint.reading.source import open_checkpoint
from megatron_lightning.checkpoint.writing.commit import is_committed, remove_checkpoint
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.file_names import EXPORT_FOLDER, MANIFEST, OUR_FILES


class Prunable(NamedTuple):
    """A deletable checkpoint, or leftovers of an interrupted save."""

    path: str
    """Path or URL."""
    size_bytes: int
    """Bytes freed by a deletion."""
    reason: str
    """Why the entry may be deleted."""
    files: tuple[str, ...] = ()
    """Deletable files of the entry. Empty: the full entry."""


def find_prunable(
    folder: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep: Sequence[str] = (),
    min_age_s: float = 3600.0,
) -> list[Prunable]:
    """Return the deletable entries of a folder of checkpoints. Only our own files and directories
    are ever named.

    Always: leftovers of killed saves, unless locked by a running save or younger than
    ``min_age_s``. With ``keep_last`` or ``keep_every``: every committed checkpoint kept by no rule.
    Targets of links in the folder, and the best and last checkpoints named by the newest
    checkpoint's callbacks, are kept. A checkpoint without all files neither counts nor is deleted.
    For the arguments see ``commands.prune``.
    """
    top = str(folder) if is_remote(folder) else local_path(folder)
    try:
        list_folders(top)
    except OSError as error:
        raise ConfigError(
            f"{top} is not a directory. Name the folder that holds the checkpoints."
        ) from error
    for name, number in (("keep_last", keep_last), ("keep_every", keep_every)):
        if number is not None and number < 1:
            raise ConfigError(f"{name} is {number}. It must be a positive integer, or left out.")
    if is_committed(top):
        raise ConfigError(f"{top} is a checkpoint itself. Name the folder that holds it.")
    prunable = [*_leftovers(top, min_age_s), *_strays(top, min_age_s)]
    if keep_last is None and keep_every is None:
        return prunable
    checkpoints = list_checkpoints(top)
    # Targets of links (last.ckpt), and the best and last checkpoints of the callbacks.
    referred = _referred_to(top, checkpoints)
    # Nobody can resume from a checkpoint without all files.
    sound = [checkpoint for checkpoint in checkpoints if _has_its_files(checkpoint.path)]
    referred |= {checkpoint.path for checkpoint in sound[-keep_last:]} if keep_last else set()
    for checkpoint in sound:
        by_step = (
            keep_every is not None and checkpoint.step >= 0 and checkpoint.step % keep_every == 0
        )
        by_name = any(fnmatchcase(checkpoint.name, pattern) for pattern in keep)
        if checkpoint.path not in referred and not by_step and not by_name:
            size_bytes = sum(folder_of(checkpoint.path).sizes().values())
            size_bytes += _nested_bytes(checkpoint.path)
            prunable.append(Prunable(checkpoint.path, size_bytes, f"old: step {checkpoint.step}"))
    return prunable


def _has_its_files(path: str) -> bool:
    """Whether all files of a checkpoint's manifest exist with the manifest's sizes. The files are
    not read.
    """
    return read_manifest(path).files.items() <= folder_of(path).sizes().items()


def prune(found: Sequence[Prunable]) -> None:
    """Delete the result of :func:`find_prunable`. Each checkpoint disappears from view in a single
    step.
    """
    for entry in found:
        if entry.files:
            folder_of(entry.path).remove(entry.files)
        else:
            remove_checkpoint(entry.path)


def _leftovers(folder: str | Path, min_age_s: float) -> Iterator[Prunable]:
    """Yield temporary directories and files of killed local saves."""
    if not isinstance(folder, Path):
        return
    exports = folder.glob(f"*/{EXPORT_FOLDER}.*")  # of exports into checkpoints
    for path in sorted([*folder.iterdir(), *exports]):
        leftover = LEFTOVER.fullmatch(path.name)
        if not leftover or path.is_symlink() or time.time() - path.stat().st_mtime < min_age_s:
            continue
        # The replaced file is the only copy if the successor was never renamed.
        superseded = leftover["kind"] == "tmp" or os.path.lexists(path.parent / leftover["name"])
        if superseded and not _is_in_use(path):
            size = (
                sum(e.stat().st_size for e in path.rglob("*"))
                if path.is_dir()
                else path.stat().st_size
            )
            yield Prunable(str(path), size, "left by an interrupted save")


def _strays(folder: str | os.PathLike[str], min_age_s: float) -> Iterator[Prunable]:
    """Yield files of uncommitted saves under their final name."""
    for path in list_folders(folder):
        if LEFTOVER.fullmatch(last_part(path)):
            continue
        place = folder_of(path)
        sizes = place.sizes()
        try:
            known_files = read_manifest(path).files if MANIFEST in sizes else {}
        except CheckpointError:
            continue  # damaged: the files are unknown
        strays = [name for name in sizes if OUR_FILES.fullmatch(name) and name not in known_files]
        if not strays or any(_age_s(place, name) < min_age_s for name in strays):
            continue
        size_bytes = sum(sizes[name] for name in strays)
        if known_files:
            yield Prunable(path, size_bytes, "left by an interrupted save", tuple(strays))
        elif len(strays) == len(sizes) and not list_folders(path):
            yield Prunable(path, size_bytes, "never committed")


def _nested_bytes(checkpoint: str) -> int:
    """Return the bytes of the Hugging Face folder in a checkpoint."""
    nested = None if is_remote(checkpoint) else local_path(checkpoint) / EXPORT_FOLDER
    files = [] if nested is None else nested.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def _age_s(folder: Folder, name: str) -> float:
    """Return the age of a file. 0 for storage without times."""
    modified = folder.modified(name)
    return 0.0 if modified is None else time.time() - modified


def _is_in_use(path: Path) -> bool:
    """Whether a running save holds the path's lock, or locks do not work."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return not try_lock(descriptor)
    finally:
        release(descriptor)


def _referred_to(folder: str | Path, checkpoints: Sequence[StoredCheckpoint]) -> set[str]:
    """Return the checkpoints referred to by links or by the callbacks of the newest readable
    checkpoint.
    """
    names: set[str] = set()
    for checkpoint in reversed(checkpoints):
        try:
            names = {
                last_part(path)
                for path in _paths_in(open_checkpoint(checkpoint.path).state().get("callbacks", {}))
            }
        except CheckpointError:
            continue  # damaged: use an older checkpoint
        break
    if not isinstance(folder, Path):
        return {checkpoint.path for checkpoint in checkpoints if checkpoint.name in names}
    paths = {path.resolve() for path in folder.iterdir() if path.is_symlink()} | {
        (folder / name).resolve() for name in names
    }
    return {
        checkpoint.path for checkpoint in checkpoints if Path(checkpoint.path).resolve() in paths
    }


def _paths_in(callbacks: Any) -> Iterator[str]:
    for state in callbacks.values() if isinstance(callbacks, dict) else ():
        if isinstance(state, dict):
            paths = [
                state.get("best_model_path"),
                state.get("last_model_path"),
                *(state.get("best_k_models") or ()),
            ]
            yield from (path for path in paths if path and isinstance(path, str))
