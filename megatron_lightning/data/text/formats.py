"""The format of a data file by its name, and the bytes behind a compression. One function decides
for ``preprocess`` and for fine-tuning.
"""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Literal, NamedTuple

from megatron_lightning.errors import DataError
from megatron_lightning.optional import missing

Kind = Literal["lines", "csv", "parquet", "arrow", "text"]
_KINDS: tuple[tuple[str, Kind], ...] = (
    (".jsonl", "lines"),
    (".ndjson", "lines"),
    (".json", "lines"),
    (".csv", "csv"),
    (".parquet", "parquet"),
    (".arrow", "arrow"),
)
ROW_SUFFIXES = tuple(suffix for suffix, _ in _KINDS)
"""Suffixes of files with rows. A suffix of a compression may follow that of lines and CSV."""
_COMPRESSIONS: Mapping[str, str] = {".gz": "gzip", ".zst": "zstd"}


class FileFormat(NamedTuple):
    """Format of a data file."""

    kind: Kind
    """``lines``: a JSON value in each line. ``text``: any other file, a document as a whole."""
    compression: str | None
    """fsspec's name of the compression. None: uncompressed."""


def format_of(path: str) -> FileFormat:
    """Return the format of a file or URL, by the suffixes in upper or lower case."""
    name = path.lower()
    suffix = next((suffix for suffix in _COMPRESSIONS if name.endswith(suffix)), "")
    inner = name.removesuffix(suffix)
    kind: Kind = next((kind for end, kind in _KINDS if inner.endswith(end)), "text")
    if suffix and kind in ("parquet", "arrow"):  # compressed inside
        kind = "text"
    return FileFormat(kind, _COMPRESSIONS.get(suffix))


@contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    """Open a file or URL for reading, uncompressed.

    Raises:
        ConfigError: If the package of a compression is missing.
        DataError: If the file cannot be opened, or is damaged.
    """
    import fsspec

    method = format_of(path).compression
    try:
        with fsspec.open(path, "rb", compression=method) as file:
            # the reader of zstd has no lines
            yield io.BufferedReader(file) if method == "zstd" else file
    except ValueError as error:
        if "ompression type" not in str(error):
            raise
        raise missing("zstandard", f"{path}: reading .zst") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: is damaged ({error}); copy it again") from error


def without_bom(raw: bytes) -> bytes:
    """Return the first bytes of a file without the mark that some programs write before UTF-8."""
    return raw.removeprefix(codecs.BOM_UTF8)
