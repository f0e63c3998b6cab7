"""Digest of the content of indexed files for checkpoints, without reading all bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from megatron_lightning.data.indexed.indexed_files import bin_path, idx_path
from megatron_lightning.data.indexed.remote import BlockCache, RemoteFile, is_remote

_PIECE_BYTES = 1 << 20


def content_digest(prefix: str, cache: BlockCache | None = None) -> str:
    """Return a digest of sizes, begins, middles and ends of the two files of an indexed data set:
    the same for a copy in another place.

    Args:
        prefix: Path or URL of the files without their suffixes.
        cache: Keeps what is read from a URL.
    """
    digest = hashlib.sha256()
    for path in (idx_path(prefix), bin_path(prefix)):
        if cache is not None and is_remote(prefix):
            _add_remote(digest, cache.file(f"{prefix}{path.suffix}"))
        else:
            _add(digest, path)
    return digest.hexdigest()[:16]


def _add(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        for begin in _begins(size):
            file.seek(begin)
            digest.update(file.read(_PIECE_BYTES))


def _add_remote(digest: hashlib._Hash, file: RemoteFile) -> None:
    digest.update(len(file).to_bytes(8, "little"))
    for begin in _begins(len(file)):
        digest.update(file[begin : begin + _PIECE_BYTES].tobytes())


def _begins(size: int) -> tuple[int, int, int]:
    """Return the begins of the pieces of a file."""
    return 0, max(0, size // 2), max(0, size - _PIECE_BYTES)
