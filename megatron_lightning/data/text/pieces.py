"""Pieces of the input of ``preprocess``: what one worker tokenizes at a time.

Pieces follow from the input alone, never from the number of workers, so that the output is the same
for any number and a killed run goes on with the pieces that are complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fsspec.core import url_to_fs

from megatron_lightning.data.text.corpus import count_lines, read_file, row_groups
from megatron_lightning.data.text.formats import format_of
from megatron_lightning.data.text.records import Record
from megatron_lightning.errors import DataError

_LARGEST, _SMALLEST = 1 << 26, 1 << 18  # bytes of a piece
_NUM_PIECES = 64  # of an input between these sizes


@dataclass(frozen=True)
class Piece:
    """A part of a file, or several small files."""

    files: tuple[str, ...]
    stamps: tuple[str, ...]
    """Size and date of each file."""
    num_bytes: int
    begin: int = 0
    """See :func:`read_file`."""
    end: int | None = None

    def records(self) -> Iterator[Record]:
        """Yield the documents.

        Raises:
            DataError: If a document cannot be read, or a file has changed since the cut.
        """
        yield from self._records(1)

    def counted(self) -> Iterator[Record]:
        """Yield the documents of a file of lines with the numbers of their lines in the file."""
        yield from self._records(1 + count_lines(self.files[0], self.begin))

    @property
    def needs_counting(self) -> bool:
        """Whether the lines of the piece are not the first lines of the file."""
        return self.begin > 0 and format_of(self.files[0]).kind == "lines"

    def _records(self, first_line: int) -> Iterator[Record]:
        for path, stamp in zip(self.files, self.stamps, strict=True):
            yield from read_file(path, self.begin, self.end, first_line=first_line)
            if _File.of(path).stamp != stamp:
                raise DataError(
                    f"{path}: changed while it was read, so that its documents are of two "
                    "versions. Run the same command again when the file is complete."
                )


def cut(files: Sequence[str]) -> list[Piece]:
    """Return the pieces of files, in order: large files of lines by bytes, Parquet files by row
    groups, compressed files whole, and small files together.
    """
    opened = [_File.of(path) for path in files]
    total = sum(file.size for file in opened)
    limit = min(max(total // _NUM_PIECES, _SMALLEST), _LARGEST)
    pieces: list[Piece] = []
    small: list[_File] = []
    for file in opened:
        if file.size < limit:
            small.append(file)
            if sum(one.size for one in small) >= limit:
                pieces.append(_joined(small))
                small = []
            continue
        pieces += [_joined(small)] if small else []
        small = []
        bounds = [(0, None, file.size)] if file.is_whole else _bounds(file, limit)
        pieces += [
            Piece((file.path,), (file.stamp,), size, begin, end) for begin, end, size in bounds
        ]
    return pieces + ([_joined(small)] if small else [])


@dataclass(frozen=True)
class _File:
    path: str
    size: int
    stamp: str

    @classmethod
    def of(cls, path: str) -> _File:
        system, path_inside = url_to_fs(path)
        info: dict[str, Any] = system.info(path_inside)
        size = int(info.get("size") or 0)
        date = next((info[key] for key in _DATES if info.get(key) is not None), "")
        return cls(path, size, f"{size} {date}")

    @property
    def is_whole(self) -> bool:
        """Whether the file is read from begin to end."""
        kind, compression = format_of(self.path)
        return compression is not None or kind not in ("lines", "parquet")


_DATES = ("mtime", "etag", "ETag", "LastModified", "last_modified", "updated", "created")
"""Entries of file systems that change with a file."""


def _joined(files: Sequence[_File]) -> Piece:
    return Piece(
        tuple(file.path for file in files),
        tuple(file.stamp for file in files),
        sum(file.size for file in files),
    )


def _bounds(file: _File, limit: int) -> list[tuple[int, int | None, int]]:
    """Return begin, end and bytes of the pieces of a file."""
    if format_of(file.path).kind != "parquet":
        return [
            (begin, min(begin + limit, file.size), min(limit, file.size - begin))
            for begin in range(0, max(file.size, 1), limit)
        ]
    bounds: list[tuple[int, int | None, int]] = []
    begin = size = 0
    groups = row_groups(file.path)
    for index, num_bytes in enumerate(groups):
        size += num_bytes
        if size >= limit or index + 1 == len(groups):
            bounds.append((begin, index + 1, size))
            begin, size = index + 1, 0
    return bounds
