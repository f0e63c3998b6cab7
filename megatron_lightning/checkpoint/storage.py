"""Local files: durable writes and reads of byte ranges.

A shared file system (NFS, Lustre) is a local path to us. Errors of the operating system leave as ``OSError``; callers
that know what the file means turn them into a ``CheckpointError``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from megatron_lightning.errors import CheckpointError


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> int:
    """Write a new file and flush it to the disk.

    Args:
        path: A file that does not exist yet.
        chunks: Its content, one piece after another.

    Returns:
        Its size in bytes.
    """
    with open(path, "xb", buffering=0) as file:
        for chunk in chunks:
            rest = memoryview(chunk)
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
        return file.tell()


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to the disk, so that a rename survives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RangeReader:
    """Reads byte ranges of one file whose size is known beforehand.

    Args:
        path: The file; a symbolic link is refused, because it could lead out of the checkpoint.
        size_bytes: The size the file must have.

    Raises:
        CheckpointError: If the file is missing, unreadable, or of another size.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error.strerror}), and the checkpoint's manifest names it. Restore the file or "
                "resume from another checkpoint."
            ) from error
        found = os.fstat(self._descriptor).st_size
        if found != size_bytes:
            self.close()
            raise CheckpointError(
                f"{path} has {found} bytes, and the manifest says {size_bytes}: the file was truncated or replaced. "
                "Restore it or resume from another checkpoint."
            )

    def read(self, start: int, length: int) -> bytearray:
        """Return ``length`` bytes from byte ``start``."""
        buffer = bytearray(length)
        view, position = memoryview(buffer), start
        while view:
            count = os.preadv(self._descriptor, [view], position)
            if count == 0:
                raise CheckpointError(
                    f"{self.path} ended at byte {position} while it was read. Resume from another checkpoint."
                )
            view, position = view[count:], position + count
        return buffer

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
