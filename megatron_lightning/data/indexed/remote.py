"""Files at a URL, read in blocks that are kept on the local disk.

The blocks of all files lie in one folder, shared by the processes of a node. A block is a file and
appears when it is complete, so that any number of processes may fetch and read at once. When the
folder has grown above its size, the blocks fetched first are removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import posixpath
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from fsspec.core import url_to_fs

from megatron_lightning.data.indexed.atomic_files import atomic_write
from megatron_lightning.errors import ConfigError, DataError

BLOCK = 1 << 20
"""Bytes of a block."""
_TRIES = 6
_FIRST_PAUSE_S = 0.1  # doubled with each try
_NUM_THREADS = 16
_SWEEP = 64  # fetched blocks between two looks at the folder's size


def is_remote(path: str) -> bool:
    """Return whether a path is a URL of another machine."""
    return "://" in path and not path.startswith("file://")


def local_path(path: str) -> str:
    """Return a local path without the name of its file system."""
    return path.removeprefix("file://")


def store_of(url: str) -> tuple[Any, str]:
    """Return fsspec's store of a path or URL, and the path there.

    Raises:
        ConfigError: If there is no such store, or the package of the store is missing.
    """
    try:
        system, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{url} cannot be reached: {error}. Install fsspec's package for the store, or copy "
            "the files and set a local path."
        ) from error
    return system, str(path)


def written_path(path: str, option: str) -> str:
    """Return the local path of files that are written or mapped here.

    Raises:
        ConfigError: If the path is a URL of another machine.
    """
    if is_remote(path):
        raise ConfigError(
            f"{option}={path} is a URL, and these files are on a disk of this machine. Set "
            f"{option} to a local path, and copy the files."
        )
    return local_path(path)


def canonical_path(path: str) -> str:
    """Return the common name of all spellings of a path or URL."""
    if not is_remote(path):
        return os.path.realpath(local_path(path))
    protocol, _, name = path.partition("://")
    return f"{protocol}://{posixpath.normpath(name.lstrip('/'))}"


@dataclass(frozen=True)
class BlockCache:
    """Folder of fetched blocks."""

    folder: str
    max_bytes: int | None = None
    """Size of the folder. None: without a limit."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", written_path(self.folder, "cache_dir"))

    def file(self, url: str) -> RemoteFile:
        """Return a file at a URL.

        Raises:
            DataError: If the file does not exist, or the store does not answer.
        """
        return RemoteFile(url, self)

    def whole(self, url: str) -> Path:
        """Return a local copy of a file at a URL.

        Raises:
            DataError: If the file cannot be read.
        """
        remote = self.file(url)
        path = remote.folder / "whole"
        if path.exists():
            return path
        with remote.locked():
            if not path.exists():  # else copied by another process meanwhile
                with remote.kept(path) as file:
                    for begin in range(0, len(remote), 8 * BLOCK):
                        file.write(remote.fetched(begin, min(begin + 8 * BLOCK, len(remote))))
        return path

    def sweep(self) -> None:
        """Remove the blocks fetched first while the folder is too large."""
        if self.max_bytes is None:
            return
        blocks = [(s.st_mtime, s.st_size, p) for p, s in _blocks_in(self.folder)]
        excess = sum(size for _, size, _ in blocks) - self.max_bytes
        for _, size, path in sorted(blocks):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size


def _blocks_in(folder: str) -> Iterable[tuple[Path, os.stat_result]]:
    for path in Path(folder).glob("*.blocks/[0-9]*"):
        with suppress(FileNotFoundError):  # another process has removed it
            yield path, path.stat()


class RemoteFile:
    """The bytes of a file at a URL. A slice gives an array of bytes.

    Args:
        url: The URL.
        cache: Folder of blocks.

    Raises:
        DataError: If the file does not exist, or the store does not answer.
    """

    def __init__(self, url: str, cache: BlockCache) -> None:
        self.url = url
        self.cache = cache
        system, path = store_of(url)
        info: dict[str, Any] = self._tried(lambda: system.info(path))
        if info.get("size") is None:
            raise DataError(f"{url}: the store does not tell the size. Copy the file.")
        self._size = int(info["size"])
        stamp = next((info[k] for k in ("ETag", "etag", "mtime", "created") if k in info), "")
        digest = hashlib.sha256(f"{url} {self._size} {stamp}".encode()).hexdigest()[:24]
        self.folder = Path(cache.folder, f"{digest}.blocks")
        """Folder of the file's blocks. Another version of the file has another folder."""
        self._num_fetched = 0
        self._threads: tuple[int, ThreadPoolExecutor] | None = None
        self._begun: set[int] = set()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: slice) -> npt.NDArray[np.uint8]:
        begin, end, _ = place.indices(self._size)
        parts = [self._part(block, begin, end) for block in _blocks_of(begin, end)]
        return np.frombuffer(b"".join(parts), np.uint8)

    def view(self, dtype: npt.DTypeLike) -> RemoteArray:
        """Return the file as an array."""
        return RemoteArray(self, np.dtype(dtype))

    def ahead(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Fetch the blocks of byte ranges in the background, for reads to come."""
        blocks = {block for begin, end in ranges for block in _blocks_of(begin, end)}
        for block in sorted(blocks - self._begun):
            if not self._path(block).exists():
                self._begun.add(block)
                self._pool().submit(self._fetch_quietly, block)

    def fetched(self, begin: int, end: int) -> bytes:
        """Return bytes from the store."""
        # fsspec keeps the store for each process. The store of a process before a fork is unusable.
        system, path = store_of(self.url)
        content: bytes = self._tried(lambda: system.cat_file(path, start=begin, end=end))
        if len(content) != end - begin:
            raise DataError(
                f"{self.url}: bytes {begin} to {end} have {len(content)} bytes: the file is being "
                "changed. Start again when it is complete."
            )
        return content

    @contextmanager
    def kept(self, path: Path) -> Iterator[BinaryIO]:
        """Open a file of the folder for writing. The file appears at the end of the block.

        Raises:
            DataError: If the file cannot be written.
        """
        with self._write_errors_explained(), atomic_write(path) as file:
            yield file

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude the other processes of the node, so that a file is copied once.

        Raises:
            DataError: If the folder cannot be written.
        """
        with self._write_errors_explained(), (self.folder / "lock").open("ab") as lock:
            with suppress(OSError):  # of a disk without locks: every process copies
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _write_errors_explained(self) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            raise DataError(
                f"{self.cache.folder}: what is read of {self.url} cannot be kept "
                f"({error.strerror}). Set cache_dir to a folder with more space, or cache_bytes "
                "below it."
            ) from error

    def __reduce__(self) -> tuple[object, ...]:
        return (RemoteFile, (self.url, self.cache))

    def _part(self, block: int, begin: int, end: int) -> bytes:
        """Return the bytes of a block between two places of the file."""
        start = block * BLOCK
        first, last = max(begin - start, 0), min(end - start, BLOCK)
        try:
            with self._path(block).open("rb") as file:
                file.seek(first)
                return file.read(last - first)
        except FileNotFoundError:
            return self._fetch(block)[first:last]

    def _path(self, block: int) -> Path:
        return self.folder / f"{block:08d}"

    def _fetch(self, block: int) -> bytes:
        begin = block * BLOCK
        content = self.fetched(begin, min(begin + BLOCK, self._size))
        with self.kept(self._path(block)) as file:
            file.write(content)
        self._num_fetched += 1
        if self._num_fetched % _SWEEP == 0:
            self.cache.sweep()
        return content

    def _fetch_quietly(self, block: int) -> None:
        with suppress(DataError):  # the read itself fetches again, and reports
            self._fetch(block)
        self._begun.discard(block)

    def _pool(self) -> ThreadPoolExecutor:
        # threads do not survive a fork
        if self._threads is None or self._threads[0] != os.getpid():
            self._threads = os.getpid(), ThreadPoolExecutor(_NUM_THREADS, "megatron-lightning-io")
        return self._threads[1]

    def _tried(self, call: Any) -> Any:
        """Return the answer of the store, asked several times."""
        for number in range(_TRIES):
            try:
                return call()
            except FileNotFoundError as error:
                raise DataError(f"{self.url}: there is no such file. Check the URL.") from error
            except Exception as error:  # stores raise errors of many libraries
                if number + 1 == _TRIES:
                    raise DataError(
                        f"{self.url}: the store did not answer {_TRIES} times ({error!r}). Check "
                        "the URL, the credentials and the network."
                    ) from error
                time.sleep(_FIRST_PAUSE_S * 2**number)
        return None


class RemoteArray:
    """The numbers of a file at a URL. A slice gives an array.

    Args:
        file: The file.
        dtype: Kind of the numbers.
    """

    def __init__(self, file: RemoteFile, dtype: np.dtype[np.generic]) -> None:
        self._file = file
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self._file) // self._dtype.itemsize

    def __getitem__(self, place: slice) -> npt.NDArray[np.generic]:
        begin, end, _ = place.indices(len(self))
        size = self._dtype.itemsize
        return self._file[begin * size : end * size].view(self._dtype)


def _blocks_of(begin: int, end: int) -> range:
    return range(begin // BLOCK, -(-end // BLOCK)) if end > begin else range(0)
