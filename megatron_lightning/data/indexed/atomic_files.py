"""Atomic writes: files are written under a hidden name beside the target and renamed when
complete.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def temporary_beside(path: Path) -> Path:
    """Return a name in ``path``'s folder, unique among all processes on this machine or another."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def flush_to_disk(file: BinaryIO) -> None:
    """Write ``file`` to the disk, so that a rename never publishes a file with missing bytes."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary name. The file becomes ``path`` at the end of the block, and vanishes if
    the block raises (Ctrl-C included).
    """
    temporary = temporary_beside(path)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file. The file becomes ``path`` at the end of the block, and vanishes if the
    block raises (Ctrl-C included).
    """
    with atomic_path(path) as temporary, temporary.open("xb") as file:
        yield file
        flush_to_disk(file)
