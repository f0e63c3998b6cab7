"""Identity of a run over its starts: an id in every checkpoint, with the folder and the loggers.

A start belongs to the run of the loaded checkpoint if ``default_root_dir`` is the same folder.
Any other start is a new run, with new logs.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_lightning.checkpoint.format.naming import OWN
from megatron_lightning.checkpoint.format.storage import is_remote
from megatron_lightning.checkpoint.local_copies.local import Pointer
from megatron_lightning.checkpoint.reading.source import open_checkpoint
from megatron_lightning.checkpoint.requeue import committed_requeue
from megatron_lightning.errors import CheckpointError


def new_run(root: str) -> dict[str, Any]:
    """Return a new run in the folder or URL ``root``. Draws from the system, not from a seed."""
    return {"id": uuid.uuid4().hex[:12], "root": _absolute(root), "loggers": []}


def run_of_checkpoint(path: str) -> Mapping[str, Any]:
    """Return the run in a checkpoint. Empty: of an earlier release, of another kind, or unreadable
    (loading says why).
    """
    try:
        pointer = None if is_remote(path) else Pointer.read(path)
        if pointer is not None:
            return pointer.run
        own = open_checkpoint(committed_requeue(path)).state().get(OWN) or {}
        run: Mapping[str, Any] = own.get("run", {})
        return run
    except (CheckpointError, OSError):
        return {}


def is_run_in(run: Mapping[str, Any], root: str) -> bool:
    """Whether ``run`` has its form and belongs to the folder or URL ``root``."""
    return (
        isinstance(run.get("id"), str)
        and run.get("root") == _absolute(root)
        and isinstance(run.get("loggers"), Sequence)
    )


def _absolute(root: str) -> str:
    return root if is_remote(root) else os.path.realpath(root)
