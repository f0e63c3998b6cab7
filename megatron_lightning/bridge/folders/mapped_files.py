"""Files of a folder as mapped memory, refused once they have changed."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from megatron_lightning.errors import CheckpointError

_MAX_MAPS = 64


class MappedFiles:
    """The files of a folder, mapped when needed.

    Args:
        path: The folder.
        way_out: Advice for a missing file, such as "Download or restore the folder."
    """

    def __init__(self, path: Path, way_out: str) -> None:
        self._path = path
        self._way_out = way_out
        self._maps: dict[str, mmap.mmap] = {}
        self._stamps: dict[str, tuple[int, int, int]] = {}

    def size(self, file: str) -> int:
        """Return the bytes of a file. The first call keeps the state of the file for :meth:`map`.

        Raises:
            CheckpointError: If the file is missing, or no regular file.
        """
        if file not in self._stamps:
            self._stamps[file] = self._stamp(file)
        return self._stamps[file][0]

    def map(self, file: str) -> mmap.mmap:
        """Return the mapped file. Pages are private, since torch wants writable memory.

        Raises:
            CheckpointError: If the file has changed since :meth:`size` was called.
        """
        self._check(file)
        if file not in self._maps:
            while len(self._maps) >= _MAX_MAPS:
                self._maps.pop(next(iter(self._maps)))  # unmapped with the last view of the file
            with (self._path / file).open("rb") as stream:
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            self._check(file)
        return self._maps[file]

    def _check(self, file: str) -> None:
        if self._stamp(file) != self._stamps[file]:  # a shorter file would be a bus error
            raise CheckpointError(
                f"{self._path / file} has changed while it was read. Start again when nobody "
                "writes to it."
            )

    def _stamp(self, file: str) -> tuple[int, int, int]:
        status = file_status(self._path / file, self._way_out)
        return status.st_size, status.st_mtime_ns, status.st_ino


def file_status(path: Path, way_out: str) -> os.stat_result:
    """Return the status of a regular file.

    Args:
        path: The file.
        way_out: Advice for a missing file.

    Raises:
        CheckpointError: If the file is missing, or no regular file.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise CheckpointError(f"{path} is missing ({error.strerror}). {way_out}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is no regular file, and reading it may never end. {way_out}")
    return status
