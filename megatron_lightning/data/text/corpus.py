"""Readers of documents: JSON lines, Parquet and plain text, compressed or not, local or at a URL,
and the Python standard library's own source.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_lightning.data.indexed.remote import store_of
from megatron_lightning.data.text.formats import format_of, opened, without_bom
from megatron_lightning.data.text.records import Record, Row
from megatron_lightning.errors import DataError
from megatron_lightning.optional import require

STDLIB = "stdlib"
"""Input name of the standard library's source: 12 MB of real text, present on every machine."""
_NOT_EVERYWHERE = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


def stdlib_files() -> list[Path]:
    """Return the standard library's source files by name, without tests, installed packages and
    blank files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_EVERYWHERE]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(
        (path for path in files if path.read_bytes().strip()),
        key=lambda path: path.relative_to(root).as_posix(),
    )


def input_files(inputs: str | Sequence[str]) -> list[str]:
    """Return the files named by ``inputs``: ``"stdlib"``, a path, a glob pattern, a URL of fsspec,
    or several of these, in the given order. The files of a pattern are sorted by name.

    Raises:
        ConfigError: If the store of a URL is unknown.
        DataError: If there is no file, or a file is missing, is a folder or cannot be read.
    """
    names = [inputs] if isinstance(inputs, str) else inputs
    files = [file for name in names for file in _files_of(str(name))]
    if not files:
        raise DataError(
            f"input={inputs!r} names no file; set it to {STDLIB!r} or to JSON-lines or text files"
        )
    for file in files:
        system, path = store_of(file)
        if system.isdir(path):
            raise DataError(
                f"{file} is a directory, and input takes files; list those in it, as in --input "
                f"{file}/*.txt"
            )
        try:
            # Opened once here, since workers would fail one by one, later.
            system.open(path, "rb").close()
        except OSError as error:
            raise DataError(
                f"{file}: cannot be read ({error.strerror or error}); set input to {STDLIB!r} or "
                "to existing files"
            ) from error
    return files


def _files_of(name: str) -> list[str]:
    """Return the files of an input."""
    if name == STDLIB:
        return [str(path) for path in stdlib_files()]
    system, path_inside = store_of(name)
    if not any(character in path_inside for character in "*?[") or system.exists(path_inside):
        return [name]
    files = sorted(path for path in system.glob(path_inside) if not system.isdir(path))
    if not files:
        raise DataError(f"{name}: no file has such a name; set input to existing files")
    return [system.unstrip_protocol(path) if "://" in name else path for path in files]


def read_records(files: Sequence[str | Path]) -> Iterator[Record]:
    """Yield the documents of ``files`` in order: each line of a ``.jsonl``, ``.ndjson`` or
    ``.json`` file, each row of a ``.parquet`` file, each other file as a whole. Files may be
    compressed (``.gz``, ``.zst``).

    A blank line of a JSON-lines file is no document.

    Raises:
        DataError: If there is no document at all.
    """
    empty = True
    for path in map(str, files):
        for record in read_file(path):
            yield record
            empty = False
    if empty:
        raise no_documents(files)


def no_documents(files: Sequence[str | Path]) -> DataError:
    """Return the error of files without documents."""
    return DataError(
        f"{', '.join(map(str, files[:5]))}: no document, only blank lines; set input to files with "
        "text"
    )


def read_file(
    path: str, begin: int = 0, end: int | None = None, *, first_line: int = 1
) -> Iterator[Record]:
    """Yield the documents of a file, or of a part of it.

    Args:
        path: The file.
        begin: First byte of a part of a file of lines, or first row group of a Parquet file. Lines
            belong to the part in which they begin.
        end: End of the part. None: the file's.
        first_line: Number of the first line of the part.
    """
    kind = format_of(path).kind
    if kind == "parquet":
        yield from _read_parquet(path, begin, end)
    elif kind == "lines":
        yield from _read_lines(path, begin, end, first_line)
    else:
        with opened(path) as file:
            yield Record(path, 1, without_bom(file.read()), is_json=False)


def _read_lines(path: str, begin: int, end: int | None, first_line: int) -> Iterator[Record]:
    with opened(path) as file:
        if begin:
            file.seek(begin - 1)
            file.readline()  # of the part before
        number = first_line
        while (end is None or file.tell() < end) and (line := file.readline()):
            is_first = begin == 0 and number == 1
            if line.strip():
                raw = without_bom(line) if is_first else line
                yield Record(path, number, raw, is_json=True)
            number += 1


def count_lines(path: str, end: int) -> int:
    """Return the number of lines of a file that begin before byte ``end``."""
    count = 0
    with opened(path) as file:
        while file.tell() < end and file.readline():
            count += 1
    return count


def row_groups(path: str) -> list[int]:
    """Return the bytes of each row group of a Parquet file."""
    with _parquet(path) as table:
        groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
        return [group.total_byte_size for group in groups]


def _read_parquet(path: str, begin: int, end: int | None) -> Iterator[Record]:
    with _parquet(path) as table:
        end = table.num_row_groups if end is None else end
        sizes = [table.metadata.row_group(i).num_rows for i in range(begin)]
        row = sum(sizes) + 1
        for group in range(begin, end):
            for fields in table.read_row_group(group).to_pylist():
                yield Row(path, row, values=fields)
                row += 1


@contextmanager
def _parquet(path: str) -> Iterator[Any]:
    arrow = require("pyarrow", f"{path}: reading Parquet")
    parquet = require("pyarrow.parquet", f"{path}: reading Parquet")
    with opened(path) as file:
        try:
            yield parquet.ParquetFile(file)
        except arrow.ArrowInvalid as error:
            raise DataError(f"{path}: is no Parquet file, or damaged ({error})") from error
