"""Digest of the content of indexed files for checkpoints, without reading all bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from megatron_lightning.data.indexed import bin_path, idx_path

_PIECE_BYTES = 1 << 20


def content_digest(prefix: str) -> str:
    """Return a digest of sizes, begins, middles and ends of the two files of an indexed data set:
    the same for a copy in another place.

    Args:
        prefix: Path of the files without their suffixes.
    """
    digest = hashlib.sha256()
    for path in (idx_path(prefix), bin_path(prefix)):
        _add(digest, path)
    return digest.hexdigest()[:16]


def _add(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        for begin in (0, max(0, size // 2), max(0, size - _PIECE_BYTES)):
            file.seek(begin)
            digest.update(file.read(_PIECE_BYTES))
