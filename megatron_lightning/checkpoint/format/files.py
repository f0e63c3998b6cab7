"""Durable writes, atomic renames and locks on this machine's file system."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_AHEAD_BYTES = 1 << 20
_MAX_NAME_BYTES = 255  # of every usual file system


def new_identifier() -> str:
    """Return a unique id of a save."""
    return uuid.uuid4().hex[:12]


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> int:
    """Write a new local file, flush the file to the disk and return the size in bytes."""
    with open(path, "xb", buffering=0) as file:
        begun = 0
        for chunk in chunks:
            remaining = memoryview(chunk)
            while remaining:
                remaining = remaining[file.write(remaining) :]
            # The disk writes while the next chunk is computed.
            if file.tell() - begun >= _AHEAD_BYTES:
                _begin_writing(file.fileno(), begun, file.tell() - begun)
                begun = file.tell()
        os.fsync(file.fileno())
        return file.tell()


def _begin_writing(descriptor: int, start: int, length: int) -> None:
    """Start writing bytes of a file to the disk, if the system has a call for early writes
    (Linux).
    """
    try:
        write = 2  # SYNC_FILE_RANGE_WRITE
        ctypes.CDLL(None).sync_file_range(
            descriptor, ctypes.c_int64(start), ctypes.c_int64(length), write
        )
    except (OSError, AttributeError):  # no such call in this C library
        return


def beside(path: Path, mark: str) -> Path:
    """Return a name in the same directory with the suffix ``mark``. A name too long is
    truncated.
    """
    start = os.fsencode(path.name)[: _MAX_NAME_BYTES - len(mark)].decode(errors="ignore")
    return path.with_name(start + mark)


def sync_directory(path: Path) -> None:
    """Flush the names in a local directory to the disk, if the file system can: a rename then
    survives power loss.
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
    """Swap two names of a local directory atomically. False if the system cannot swap."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        current_folder, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        return bool(
            libc.renameat2(
                current_folder, os.fsencode(first), current_folder, os.fsencode(second), swap
            )
            == 0
        )
    except (OSError, AttributeError):  # no such call in this C library
        return False


def make_locked(directory: Path) -> int:
    """Make a directory and return the locking descriptor. Repeat if another job deleted the
    directory before the lock.
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
    """Wait for the lock. False if the file system has no locks."""
    return _lock(descriptor, fcntl.LOCK_EX)


def try_lock(descriptor: int) -> bool:
    """Take the lock if free. False also if the file system has no locks."""
    return _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def abandoned(folder: Path, names: re.Pattern[str]) -> Iterator[Path]:
    """Yield the directories of these names in ``folder`` that no process has locked, locked
    meanwhile. None if the file system has no locks.
    """
    for entry in list(folder.iterdir()):
        if not names.fullmatch(entry.name) or entry.is_symlink() or not entry.is_dir():
            continue
        try:
            descriptor = os.open(entry, os.O_RDONLY)
        except OSError:
            continue  # another job cleans up at the same time, or another user owns it
        try:
            if try_lock(descriptor):
                yield entry
        finally:
            release(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind)
    except OSError:
        return False
    return True


def release(descriptor: int) -> None:
    """Unlock and close: data loader workers forked since share the descriptor and the lock."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
