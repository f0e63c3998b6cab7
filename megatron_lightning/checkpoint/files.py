"""Names, bytes and locks of this machine's file system: written durably, renamed in one step, told from what is abandoned."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_AHEAD_BYTES = 1 << 20
_MAX_NAME_BYTES = 255  # of every usual file system


def new_identifier() -> str:
    """Return an id that no other save has."""
    return uuid.uuid4().hex[:12]


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> int:
    """Write a new local file and flush it to the disk.

    Args:
        path: A file that does not exist yet.
        chunks: Its content, one piece after another.

    Returns:
        Its size in bytes.
    """
    with open(path, "xb", buffering=0) as file:
        begun = 0
        for chunk in chunks:
            rest = memoryview(chunk)
            while rest:
                rest = rest[file.write(rest) :]
            if file.tell() - begun >= _AHEAD_BYTES:  # the disk works while the next chunk is made, not only in fsync
                _begin_writing(file.fileno(), begun, file.tell() - begun)
                begun = file.tell()
        os.fsync(file.fileno())
        return file.tell()


def _begin_writing(descriptor: int, start: int, length: int) -> None:
    """Let the system begin to bring bytes of a file to the disk, where it has a call for that (Linux)."""
    try:
        write = 2  # SYNC_FILE_RANGE_WRITE
        ctypes.CDLL(None).sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(length), write)
    except (OSError, AttributeError):  # no such call in this C library
        return


def beside(path: Path, mark: str) -> Path:
    """Return a name in the same directory that ends with ``mark``; of a name too long for that the end is left out."""
    start = os.fsencode(path.name)[: _MAX_NAME_BYTES - len(mark)].decode(errors="ignore")
    return path.with_name(start + mark)


def sync_directory(path: Path) -> None:
    """Flush the names in a local directory to the disk, so that a rename survives a loss of power.

    File systems that have no such call (some of FUSE's and CIFS) keep their names safe in their own way.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def exchange(first: Path, second: Path) -> bool:
    """Swap two names of one local directory in one step; False where the system cannot."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        return bool(libc.renameat2(here, os.fsencode(first), here, os.fsencode(second), swap) == 0)
    except (OSError, AttributeError):  # no such call in this C library
        return False


def make_locked(directory: Path) -> int:
    """Make a directory and lock it; again, if another job took it for abandoned before it was locked.

    Returns:
        The descriptor that holds the lock until :func:`release`.
    """
    while True:
        directory.mkdir()
        try:
            descriptor = os.open(directory, os.O_RDONLY)
        except FileNotFoundError:
            continue
        if not _lock(descriptor, fcntl.LOCK_SH) or directory.exists():
            return descriptor
        os.close(descriptor)


def lock(descriptor: int) -> bool:
    """Wait until nobody else has a lock, and take it; False where the file system has none."""
    return _lock(descriptor, fcntl.LOCK_EX)


def try_lock(descriptor: int) -> bool:
    """Take the lock if nobody else has one; False also where the file system has none."""
    return _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind)
    except OSError:
        return False
    return True


def release(descriptor: int) -> None:
    """Unlock and close: workers of a data loader, forked in the meantime, have the descriptor too, and with it the lock."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
