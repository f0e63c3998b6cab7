"""Find what a folder of checkpoints no longer needs: leftovers of interrupted saves, and old checkpoints by rule."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lightning.checkpoint.commit import is_committed, remove_checkpoint
from megatron_lightning.checkpoint.source import open_checkpoint
from megatron_lightning.checkpoint.verification import read_manifest
from megatron_lightning.errors import CheckpointError, ConfigError

_LEFTOVER = re.compile(r"(?P<name>.+)\.(?P<kind>tmp|old)-[0-9a-f]{12}")
_OURS = re.compile(r"(tensors|state)\.[0-9a-f]{12}\..+")


class StoredCheckpoint(NamedTuple):
    """A committed checkpoint directory."""

    path: Path
    """Where it is."""
    step: int
    """Its ``global_step``; -1 if it does not say."""
    saved_at: float
    """When its manifest was written, in seconds since the epoch."""


class Prunable(NamedTuple):
    """Something that may go."""

    path: Path
    """Where it is."""
    size_bytes: int
    """What deleting it frees."""
    reason: str
    """Why."""


def list_checkpoints(folder: str | os.PathLike[str]) -> list[StoredCheckpoint]:
    """Return the committed checkpoint directories in a folder, the newest last; links are not followed."""
    found = []
    for path in Path(folder).iterdir():
        if path.is_dir() and not path.is_symlink() and not _LEFTOVER.fullmatch(path.name) and is_committed(path):
            step = read_manifest(path).info.get("global_step")
            saved_at = (path / "manifest.json").stat().st_mtime
            found.append(StoredCheckpoint(path, step if isinstance(step, int) else -1, saved_at))
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.saved_at, checkpoint.path.name))


def find_prunable(
    folder: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep: Sequence[str] = (),
    min_age_s: float = 3600.0,
) -> list[Prunable]:
    """Return what may be deleted from a folder of checkpoints. Only our own files and directories are ever named.

    Always: leftovers of saves that were killed, unless a running save holds them or they are younger than ``min_age_s``.
    With ``keep_last`` or ``keep_every``: every committed checkpoint that no rule keeps. Kept are, beside the rules', what a
    link in the folder points to, and what the newest checkpoint's callbacks call their best and last.

    Args:
        folder: The folder.
        keep_last: Keep so many of the newest.
        keep_every: Keep those whose step is a multiple of this.
        keep: Keep names that fit one of these patterns.
        min_age_s: Leftovers younger than this stay.

    Raises:
        ConfigError: If the folder does not exist or a number is not positive.
    """
    top = Path(folder)
    if not top.is_dir():
        raise ConfigError(f"{top} is not a directory. Name the folder that holds the checkpoints.")
    for name, number in (("keep_last", keep_last), ("keep_every", keep_every)):
        if number is not None and number < 1:
            raise ConfigError(f"{name} is {number}. Set it to 1 or more, or leave it out.")
    if is_committed(top):
        raise ConfigError(f"{top} is a checkpoint itself. Name the folder that holds it.")
    found = list(_leftovers(top, min_age_s))
    if keep_last is None and keep_every is None:
        return found
    checkpoints = list_checkpoints(top)
    kept = _referred_to(top, checkpoints)
    kept |= {checkpoint.path for checkpoint in checkpoints[-keep_last:]} if keep_last else set()
    for checkpoint in checkpoints:
        by_step = keep_every is not None and checkpoint.step >= 0 and checkpoint.step % keep_every == 0
        by_name = any(fnmatchcase(checkpoint.path.name, pattern) for pattern in keep)
        if checkpoint.path not in kept and not by_step and not by_name:
            found.append(Prunable(checkpoint.path, _size(checkpoint.path), f"old: step {checkpoint.step}"))
    return found


def prune(found: Sequence[Prunable]) -> None:
    """Delete what :func:`find_prunable` returned; each disappears from view in one step."""
    for entry in found:
        remove_checkpoint(entry.path)


def _leftovers(folder: Path, min_age_s: float) -> Iterator[Prunable]:
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or time.time() - path.stat().st_mtime < min_age_s:
            continue
        leftover = _LEFTOVER.fullmatch(path.name)
        if leftover:
            # What stepped aside is all there is if its successor never took the name.
            superseded = leftover["kind"] == "tmp" or os.path.lexists(folder / leftover["name"])
            if superseded and not _is_in_use(path):
                yield Prunable(path, _size(path), "left by an interrupted save")
        elif path.is_dir() and not is_committed(path):
            names = os.listdir(path)
            if names and all(_OURS.fullmatch(name) for name in names):
                yield Prunable(path, _size(path), "never committed")


def _is_in_use(path: Path) -> bool:
    """Whether a running save holds its lock; where locks do not work, as if it did."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _referred_to(folder: Path, checkpoints: Sequence[StoredCheckpoint]) -> set[Path]:
    """Return the targets of links, and the paths that the newest readable checkpoint's callbacks hold."""
    kept = {path.resolve() for path in folder.iterdir() if path.is_symlink()}
    for checkpoint in reversed(checkpoints):
        try:
            callbacks = open_checkpoint(checkpoint.path).state().get("callbacks", {})
        except CheckpointError:
            continue  # damaged: an older one says what was best
        kept |= {(folder / Path(path).name).resolve() for path in _paths_in(callbacks)}
        break
    return {checkpoint.path for checkpoint in checkpoints if checkpoint.path.resolve() in kept}


def _paths_in(callbacks: Any) -> Iterator[str]:
    for state in callbacks.values() if isinstance(callbacks, dict) else ():
        if isinstance(state, dict):
            named = [state.get("best_model_path"), state.get("last_model_path"), *(state.get("best_k_models") or ())]
            yield from (path for path in named if path and isinstance(path, str))


def _size(path: Path) -> int:
    return sum(entry.stat().st_size for entry in path.rglob("*")) if path.is_dir() else path.stat().st_size
