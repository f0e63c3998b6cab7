"""The file system of a checkpoint folder, against the bytes of the kept checkpoints."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_lightning.checkpoint import open_checkpoint
from megatron_lightning.checkpoint.format.naming import OWN
from megatron_lightning.checkpoint.listing import list_checkpoints
from megatron_lightning.errors import CheckpointError
from megatron_lightning.planning.ledger.precision_bytes import precision_of
from megatron_lightning.planning.planned_run import MeasuredRecipe, Recipe

_MOMENTS_BYTES = 8  # of Adam
_TEST_BYTES, _MOST_TEST_BYTES = 1 << 26, 1 << 30


def checkpoint_bytes(recipe: Recipe | MeasuredRecipe) -> int:
    """Return the bytes of a checkpoint of a recipe: weights, main params and Adam's moments."""
    precision = precision_of(recipe.precision)
    parameter_bytes = precision.weight_bytes + precision.main_bytes + _MOMENTS_BYTES
    return parameter_bytes * recipe.num_parameters


def look_at(
    folder: str | os.PathLike[str], needed_bytes: int | None, copies: int
) -> dict[str, Any]:
    """Return free space, type and speed of a folder's file system, and whether the copies fit.

    Args:
        folder: An existing or future folder.
        needed_bytes: Bytes of a checkpoint. None: unknown.
        copies: Kept checkpoints, and the one being written.
    """
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    usage = shutil.disk_usage(path)
    all_bytes = None if needed_bytes is None else needed_bytes * copies
    return {
        "folder": str(folder),
        "type": _type_of(path),
        "free": usage.free,
        "total": usage.total,
        "write_speed": _write_speed(path, needed_bytes or 0),
        "checkpoint": needed_bytes,
        "copies": copies,
        "wanted": all_bytes,
        "fits": all_bytes is None or all_bytes <= usage.free,
        "findings": _findings(folder),
    }


def _findings(folder: str | os.PathLike[str]) -> dict[str, int]:
    """Return the findings of guards by name, up to the newest checkpoint in a folder. Empty: none,
    or no readable checkpoint.
    """
    try:
        newest = list_checkpoints(folder)[-1:]
        states = [open_checkpoint(checkpoint.path).state().get(OWN) or {} for checkpoint in newest]
    except (CheckpointError, OSError):
        return {}
    return dict(states[0].get("guards", {})) if states else {}


def _type_of(path: Path) -> str | None:
    """Return the type of the file system mounted at or above a path."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return None
    above = {str(parent) for parent in (path, *path.parents)}
    types = [(len(words[1]), words[2]) for words in mounts if words[1] in above]
    return max(types)[1] if types else None  # of the innermost mount


def _write_speed(path: Path, checkpoint_bytes: int) -> float | None:
    """Return the bytes per second of a file as large as a checkpoint, within limits: caches of file
    systems hide a small file. None without permission to write.
    """
    pieces = max(_TEST_BYTES, min(checkpoint_bytes, _MOST_TEST_BYTES)) // _TEST_BYTES
    data = os.urandom(_TEST_BYTES // 64) * 64
    try:
        with tempfile.NamedTemporaryFile(dir=path) as file:
            start = time.perf_counter()
            for _ in range(pieces):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            return pieces * _TEST_BYTES / (time.perf_counter() - start)
    except OSError:
        return None
