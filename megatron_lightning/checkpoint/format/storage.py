"""Storage of a checkpoint's files: a folder of this machine's file system, or of an object store
reached by fsspec.

A shared file system (NFS, Lustre) is a local path. ``s3://bucket/run/step=5.ckpt`` is a remote
path. Errors of the storage propagate unchanged (``OSError``, or errors of the client). Callers turn
such errors into a ``CheckpointError``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import fsspec

from megatron_lightning.checkpoint.format.files import (
    beside,
    new_identifier,
    sync_directory,
    write_file,
)
from megatron_lightning.errors import CheckpointError

_BEHIND_BYTES = 8 << 20


class RangeReader(Protocol):
    """Reads byte ranges of a file. Threads may share a reader."""

    num_streams: int
    """Best number of sequential readers of the file."""

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``start`` on."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class Folder(Protocol):
    """A flat folder of files. ``str(folder)`` names the folder in messages."""

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Write a new file durably and return the size in bytes."""
        ...

    def open(self, name: str, size_bytes: int, *, once: bool = False) -> RangeReader:
        """Open a file for reading. With ``once``, the system's cache does not keep the file."""
        ...

    def sizes(self) -> dict[str, int]:
        """Return the regular files of the folder and the sizes in bytes. Empty if the folder does
        not exist.
        """
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Delete files. Missing files are fine."""
        ...

    def modified(self, name: str) -> float | None:
        """Return the time of a file's last write, in seconds since the epoch. None if unknown."""
        ...


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a URL of an object store."""
    protocol, separator, _ = str(path).partition("://")
    return bool(separator) and protocol not in ("file", "local")


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a local path, with or without ``file://``, as an absolute path."""
    text = str(path)
    for protocol in ("file://", "local://"):
        text = text.removeprefix(protocol)
    return Path(text).absolute()


def folder_of(path: str | os.PathLike[str]) -> Folder:
    """Return the folder at a local path or URL, existing or not."""
    return RemoteFolder(str(path)) if is_remote(path) else LocalFolder(local_path(path))


def list_folders(path: str | os.PathLike[str]) -> list[str]:
    """Return the sorted folders in a folder, as paths or URLs. Links are not followed."""
    if is_remote(path):
        return sorted(RemoteFolder(str(path)).folders())
    with os.scandir(local_path(path)) as entries:
        return sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory, or objects under a common prefix, are at a local path or URL."""
    if not is_remote(path):
        return local_path(path).is_dir()
    if str(path).startswith(("http://", "https://")):  # nothing to ask: the web has no folders
        return False
    folder = RemoteFolder(str(path))
    return not folder.files.isfile(folder.root) and bool(folder.files.isdir(folder.root))


def is_plain_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a file, and no directory, is at a local path or URL."""
    if not is_remote(path):
        return local_path(path).is_file()
    folder = RemoteFolder(str(path))
    return bool(folder.files.isfile(folder.root))


def _advise(descriptor: int, advice: str, stop: int = 0) -> None:
    """Advise the system on the use of a file up to byte ``stop`` (0: the end), if the system takes
    advice.

    SEQUENTIAL reads far ahead. (WILLNEED of the exact ranges costs three times the processor time:
    Linux then reads page by page.) DONTNEED behind the reader reuses a few pages for the full file:
    a virtual machine takes two seconds to provide another GiB of memory.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # a file system without advice
            os.posix_fadvise(descriptor, 0, stop, getattr(os, advice))


def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL and the path there."""
    try:
        files, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise CheckpointError(
            f"{url} cannot be reached: {error}. Install fsspec's package for it, or name a path."
        ) from error
    return files, str(path)


@contextmanager
def completed_file(target: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a file to write. At the end of the block, without an error, the file is renamed to
    ``target``, a local path or a URL.
    """
    if is_remote(target):
        files, name = _file_system(str(target))
        with files.transaction, files.open(name, "wb") as file:
            yield file
        return
    path = local_path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = beside(path, f".tmp-{new_identifier()}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


@contextmanager
def opened(
    folder: Folder, name: str, size_bytes: int, *, once: bool = False
) -> Iterator[RangeReader]:
    """Open a file of a folder for the block, see :meth:`Folder.open`."""
    reader = folder.open(name, size_bytes, once=once)
    try:
        yield reader
    finally:
        reader.close()


def read_range(reader: RangeReader, start: int, length: int) -> bytearray:
    """Return ``length`` bytes of a file from byte ``start``."""
    buffer = bytearray(length)
    reader.read_into(start, memoryview(buffer))
    return buffer


class LocalFolder:
    """A directory of this machine's file system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        """See :class:`Folder`."""
        return write_file(self.path / name, chunks)

    def open(self, name: str, size_bytes: int, *, once: bool = False) -> RangeReader:
        """See :class:`Folder`."""
        return _LocalReader(self.path / name, size_bytes, once)

    def sizes(self) -> dict[str, int]:
        """See :class:`Folder`."""
        if not self.path.is_dir():
            return {}
        with os.scandir(self.path) as entries:
            return {
                entry.name: entry.stat().st_size
                for entry in entries
                if entry.is_file(follow_symlinks=False)
            }

    def remove(self, names: Iterable[str]) -> None:
        """See :class:`Folder`."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def modified(self, name: str) -> float | None:
        """See :class:`Folder`."""
        return (self.path / name).stat().st_mtime


class _LocalReader:
    num_streams = 1  # the system reads ahead

    def __init__(self, path: Path, size_bytes: int, once: bool) -> None:
        self._path = path
        self._once = once
        self._released = 0
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise unreadable(path, error.strerror or str(error)) from error
        num_bytes = os.fstat(self._descriptor).st_size
        if num_bytes != size_bytes:
            self.close()
            raise wrong_size(path, num_bytes, size_bytes)
        _advise(self._descriptor, "POSIX_FADV_SEQUENTIAL")

    def read_into(self, start: int, view: memoryview) -> None:
        position = start
        while view:
            try:
                count = os.preadv(self._descriptor, [view], position)
            except OSError as error:  # a bad disk
                raise unreadable(
                    f"{self._path}: bytes {position} to {position + len(view)}", str(error)
                ) from error
            if count == 0:
                raise _ended(self._path, position)
            view, position = view[count:], position + count
        if self._once and start - self._released >= _BEHIND_BYTES:
            _advise(self._descriptor, "POSIX_FADV_DONTNEED", start)
            self._released = start

    def close(self) -> None:
        if self._once:
            _advise(self._descriptor, "POSIX_FADV_DONTNEED")
        os.close(self._descriptor)


class RemoteFolder:
    """A prefix of an object store (or any other file system of fsspec's)."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.files, self.root = _file_system(self.url)

    def __str__(self) -> str:
        return self.url

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        """See :class:`Folder`. An object appears only when complete."""
        path, size_bytes = f"{self.root}/{name}", 0
        with self.files.open(path, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
                size_bytes += len(chunk)
        self.files.invalidate_cache(self.root)
        num_bytes = self.files.size(path)
        if num_bytes != size_bytes:
            raise CheckpointError(
                f"{self.url}/{name} has {num_bytes} bytes after {size_bytes} were written to it. "
                "Save again."
            )
        return size_bytes

    def open(self, name: str, size_bytes: int, *, once: bool = False) -> RangeReader:
        """See :class:`Folder`. Nothing is cached."""
        return _RemoteReader(self.files, f"{self.root}/{name}", f"{self.url}/{name}", size_bytes)

    def sizes(self) -> dict[str, int]:
        """See :class:`Folder`."""
        self.files.invalidate_cache(self.root)
        try:
            entries = self.files.ls(self.root, detail=True)
        except FileNotFoundError:
            return {}
        return {
            entry["name"].rpartition("/")[2]: entry["size"] or 0
            for entry in entries
            if entry["type"] == "file"
        }

    def remove(self, names: Iterable[str]) -> None:
        """See :class:`Folder`."""
        file_names = self.sizes().keys()
        to_delete = [f"{self.root}/{name}" for name in names if name in file_names]
        if to_delete:
            self.files.rm(to_delete)

    def modified(self, name: str) -> float | None:
        """See :class:`Folder`."""
        try:
            return float(self.files.modified(f"{self.root}/{name}").timestamp())
        except (OSError, NotImplementedError):
            return None

    def folders(self) -> list[str]:
        """Return the URLs of the folders in this folder."""
        self.files.invalidate_cache(self.root)
        entries = self.files.ls(self.root, detail=True)
        return [
            f"{self.url}/{e['name'].rstrip('/').rpartition('/')[2]}"
            for e in entries
            if e["type"] == "directory"
        ]


class _RemoteReader:
    num_streams = 4  # every range is a request, without read-ahead

    def __init__(self, files: Any, path: str, name: str, size_bytes: int) -> None:
        self._files = files
        self._path = path
        self._name = name
        try:
            num_bytes = files.size(path)
        except (OSError, LookupError) as error:
            raise unreadable(name, str(error)) from error
        if num_bytes != size_bytes:
            raise wrong_size(name, num_bytes, size_bytes)

    def read_into(self, start: int, view: memoryview) -> None:
        data = self._files.cat_file(self._path, start=start, end=start + len(view)) if view else b""
        if len(data) != len(view):
            raise _ended(self._name, start + len(data))
        view[:] = data

    def close(self) -> None:
        pass


def wrong_size(file: object, found: int, expected: int) -> CheckpointError:
    """Return the error for a file of another size than the manifest says."""
    return CheckpointError(
        f"{file} has {found} bytes, and the manifest says {expected}: the file was truncated or "
        "replaced. Restore it or resume from another checkpoint."
    )


def unreadable(file: object, reason: str) -> CheckpointError:
    """Return the error for an unreadable file named by the manifest."""
    return CheckpointError(
        f"{file} cannot be read ({reason}), and the checkpoint's manifest names it. Restore the "
        "file or resume from another checkpoint."
    )


def _ended(file: object, position: int) -> CheckpointError:
    return CheckpointError(
        f"{file} ended at byte {position} while it was read. Resume from another checkpoint."
    )
