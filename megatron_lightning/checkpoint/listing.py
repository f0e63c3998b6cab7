"""List the committed checkpoints of a folder, and read a manifest without opening the tensors."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from megatron_lightning.checkpoint.format.manifest import Manifest
from megatron_lightning.checkpoint.format.storage import folder_of, is_plain_file, list_folders
from megatron_lightning.checkpoint.reading.source import manifest_text
from megatron_lightning.checkpoint.writing.commit import is_committed
from megatron_lightning.errors import CheckpointError, MissingCheckpointError
from megatron_lightning.file_names import MANIFEST

LEFTOVER = re.compile(r"(?P<name>.+)\.(?P<kind>tmp|old)-[0-9a-f]{12}")
"""Names of directories that an interrupted save or replacement left."""


class StoredCheckpoint(NamedTuple):
    """A committed checkpoint directory."""

    path: str
    """Path or URL."""
    step: int
    """``global_step`` of the checkpoint. -1 if unknown."""
    saved_at: float
    """Time of the manifest's write, in seconds since the epoch. 0 if unknown."""

    @property
    def name(self) -> str:
        """Last part of the path."""
        return last_part(self.path)


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return the checked manifest of a checkpoint directory."""
    if is_plain_file(path):
        raise CheckpointError(
            f"{path} is a plain file, which has neither manifest nor checksums. Name a checkpoint "
            "directory."
        )
    folder = folder_of(path)
    sizes = folder.sizes()
    if MANIFEST not in sizes:
        if not sizes:
            raise MissingCheckpointError.at(path)
        raise CheckpointError(
            f"{path} has no {MANIFEST}, so it is not a committed checkpoint directory. Name one "
            "that is."
        )
    try:
        return Manifest.loads(manifest_text(folder, sizes[MANIFEST]))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def list_checkpoints(folder: str | os.PathLike[str]) -> list[StoredCheckpoint]:
    """Return the committed checkpoint directories in a folder or under a URL, the newest last.
    Links are not followed.
    """
    checkpoints = []
    for path in list_folders(folder):
        if not LEFTOVER.fullmatch(last_part(path)) and is_committed(path):
            step = read_manifest(path).info.get("global_step")
            saved_at = folder_of(path).modified(MANIFEST) or 0.0
            checkpoints.append(
                StoredCheckpoint(path, step if isinstance(step, int) else -1, saved_at)
            )
    return sorted(
        checkpoints, key=lambda checkpoint: (checkpoint.step, checkpoint.saved_at, checkpoint.path)
    )


def last_part(path: str) -> str:
    """Return the last part of a path or URL."""
    return path.rstrip("/").rpartition("/")[2]
