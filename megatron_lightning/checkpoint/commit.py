"""All or nothing: a checkpoint is written beside its final name and becomes visible in one step.

    1. every rank writes and flushes its files into ``<name>.tmp-<id>``; their names carry the id of this save
    2. the manifest is written there last
    3. a new name: the directory is renamed; an existing checkpoint: the files move into it and the new manifest
       replaces the old one. Either is decided by a single rename: a reader sees the old checkpoint or the new one.
    4. files of the old save are deleted

Killed before the rename of step 3, a save leaves the old checkpoint as it was, and a directory that the next save deletes.
The writer holds a lock on its temporary directory, by which another job's running save is told from an abandoned one.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_lightning.checkpoint.manifest import Manifest, TensorEntry
from megatron_lightning.checkpoint.storage import sync_directory, write_file
from megatron_lightning.errors import CheckpointError

MANIFEST = "manifest.json"
_OURS = re.compile(r"(tensors|state)\.[0-9a-f]{12}\..+")
_TEMPORARY = re.compile(r".+\.tmp-[0-9a-f]{12}")


def is_committed(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a checkpoint directory whose save was completed."""
    return Path(path, MANIFEST).is_file()


def new_identifier() -> str:
    """Return an id that no other save has."""
    return uuid.uuid4().hex[:12]


class PendingCheckpoint:
    """A save in progress. Every rank has one of the same identifier; the first rank begins and commits it.

    Args:
        path: Final name of the checkpoint. What stands there now stays readable until :meth:`commit`.
        identifier: From :func:`new_identifier`, the same on all ranks.
    """

    def __init__(self, path: str | os.PathLike[str], identifier: str) -> None:
        self.path, self.identifier = Path(path).absolute(), identifier
        self.folder = self.path.with_name(f"{self.path.name}.tmp-{identifier}")
        self._state_file, self._state_bytes, self._state_checksum = f"state.{identifier}.pt", 0, 0
        self._lock: int | None = None

    def begin(self, state: bytes) -> None:
        """Make the temporary directory and write the state file.

        Raises:
            CheckpointError: If a directory that is no checkpoint has the final name.
        """
        if self.path.is_dir() and not is_committed(self.path) and any(self.path.iterdir()):
            raise CheckpointError(
                f"{self.path} is a directory with other files, and a checkpoint of that name would mix with them. "
                "Choose another name or move the directory."
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self.path.parent)
        self.folder.mkdir()
        self._lock = os.open(self.folder, os.O_RDONLY)
        _try_lock(self._lock, fcntl.LOCK_SH)
        self._state_bytes, self._state_checksum = write_file(self.folder / self._state_file, [state]), zlib.crc32(state)

    def commit(self, tensors: Mapping[str, TensorEntry], files: Mapping[str, int], info: Mapping[str, Any]) -> None:
        """Write the manifest and make the checkpoint visible under its name.

        Args:
            tensors: Every tensor by its global name.
            files: Size in bytes of every file of tensors.
            info: See ``Manifest``.

        Raises:
            CheckpointError: If the tensors are not tiled exactly once.
        """
        manifest = Manifest(
            tensors=tensors,
            files={**files, self._state_file: self._state_bytes},
            state_file=self._state_file,
            state_checksum=self._state_checksum,
            info=info,
        )
        write_file(self.folder / MANIFEST, [manifest.dumps().encode()])
        sync_directory(self.folder)
        if self.path.is_dir() and not self.path.is_symlink():
            self._replace(manifest)
        elif os.path.lexists(self.path):
            # A directory cannot be renamed over a file or a link (whose target keeps its own name): they step aside.
            aside = self.path.with_name(f"{self.path.name}.old-{self.identifier}")
            os.rename(self.path, aside)
            os.rename(self.folder, self.path)
            aside.unlink()
        else:
            os.rename(self.folder, self.path)
        sync_directory(self.path.parent)
        self._unlock()

    def _replace(self, manifest: Manifest) -> None:
        for name in manifest.files:
            os.rename(self.folder / name, self.path / name)
        sync_directory(self.path)
        os.replace(self.folder / MANIFEST, self.path / MANIFEST)
        sync_directory(self.path)
        for entry in self.path.iterdir():
            if _OURS.fullmatch(entry.name) and entry.name not in manifest.files:
                entry.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def discarded_on_error(self) -> Iterator[None]:
        """Delete what was written if the block raises; the checkpoint that stood under the name, if any, is untouched."""
        try:
            yield
        except BaseException:
            if self._lock is not None:
                self._unlock()
                shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint (directory, file or link); a directory disappears from view in one step. Missing is fine."""
    path = Path(path)
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        doomed = path.with_name(f"{path.name}.tmp-{new_identifier()}")
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def remove_abandoned(folder: Path) -> None:
    """Delete the temporary directories that killed saves left in ``folder``.

    Where the file system cannot lock directories, nothing is deleted: a save that still runs must not lose its files.
    """
    for entry in folder.iterdir():
        if not _TEMPORARY.fullmatch(entry.name) or entry.is_symlink() or not entry.is_dir():
            continue
        try:
            descriptor = os.open(entry, os.O_RDONLY)
        except OSError:
            continue  # another job cleans up at the same time
        try:
            if _try_lock(descriptor, fcntl.LOCK_EX):
                shutil.rmtree(entry, ignore_errors=True)
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
