"""Readers of documents: JSON-lines files, plain-text files, and the Python standard library's own
source.

Readers yield raw records, cheap to send to a worker for decoding and parsing. A record has a file
and a line.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lightning.errors import DataError

STDLIB = "stdlib"
"""Input name of the standard library's source: 12 MB of real text, present on every machine."""
_NOT_EVERYWHERE = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
_JSON_SUFFIXES = (".jsonl", ".json")


@dataclass(frozen=True)
class Record:
    """An undecoded document: a line of JSON, or the text itself."""

    path: str
    line: int
    """Number of the record's first line in the file, from 1."""
    raw: bytes
    is_json: bool

    @property
    def where(self) -> str:
        """``file:line``, for messages."""
        return f"{self.path}:{self.line}"

    def text(self) -> str:
        """Return the record decoded as UTF-8.

        Raises:
            DataError: If the record is not UTF-8, with file, line and byte.
        """
        try:
            return self.raw.decode()
        except UnicodeDecodeError as error:
            line = self.line + self.raw.count(b"\n", 0, error.start)
            raise DataError(
                f"{self.path}:{line}: not UTF-8: byte 0x{self.raw[error.start]:02x} at offset "
                f"{error.start} of the document ({error.reason}); convert the file, for instance "
                "with `iconv -t UTF-8`"
            ) from error

    def texts(self, json_keys: Sequence[str]) -> list[str]:
        """Return the text under every key of ``json_keys``. Plain text counts as every key.

        Raises:
            DataError: If the record is undecodable, invalid JSON, or lacks a key, with file and
                line.
        """
        if not self.is_json:
            return [self.text()] * len(json_keys)
        fields = self.fields()
        return [self._field(fields, key) for key in json_keys]

    def parsed(self) -> Any:
        """Return the value of the record's JSON.

        Raises:
            DataError: If the record is undecodable or invalid JSON, with file, line and column.
        """
        text = self.text()
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            # Truncated JSON ends before the newline.
            column = min(error.pos, len(text.rstrip())) + 1
            raise DataError(
                f"{self.where}: invalid JSON at column {column}: {error.msg}; a line must be one "
                "object"
            ) from error
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{self.where}: unreadable JSON ({error}); a line must be one object"
            ) from error

    def fields(self) -> dict[str, Any]:
        """Return the fields of a line of JSON.

        Raises:
            DataError: If the record is undecodable, invalid JSON, or no object, with file and line.
        """
        fields = self.parsed()
        if not isinstance(fields, dict):
            raise DataError(
                f"{self.where}: a line must be a JSON object with a text, found "
                f"{type(fields).__name__}"
            )
        return fields

    def _field(self, fields: dict[str, object], key: str) -> str:
        value = fields.get(key)
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"{self.where}: half a character under key {key!r}: {value[error.start]!a} at "
                    f"character {error.start + 1} is one of two escapes that make a character "
                    "together; write both, or remove it"
                ) from error
            return value
        found = (
            f"{type(value).__name__} under key {key!r}"
            if key in fields
            else f"no key {key!r}, only {sorted(fields)}"
        )
        raise DataError(
            f"{self.where}: {found}; set json_keys to keys that hold text in every line"
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


def input_files(inputs: str | Sequence[str]) -> list[Path]:
    """Return the files named by ``inputs``: ``"stdlib"``, a path, or several paths, in the given
    order.

    Raises:
        DataError: If there is no file, or a file is missing, is a folder or cannot be read.
    """
    names = [inputs] if isinstance(inputs, str) else inputs
    files = [
        path for name in names for path in (stdlib_files() if name == STDLIB else [Path(name)])
    ]
    if not files:
        raise DataError(
            f"input={inputs!r} names no file; set it to {STDLIB!r} or to JSON-lines or text files"
        )
    for path in files:
        if path.is_dir():
            raise DataError(
                f"{path} is a directory, and input takes files; list those in it, as in --input "
                f"{path}/*.txt"
            )
        try:
            path.open("rb").close()
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror}); set input to {STDLIB!r} or to "
                "existing files"
            ) from error
    return files


def read_records(files: Sequence[Path]) -> Iterator[Record]:
    """Yield the documents of ``files`` in order: each line of a ``.jsonl`` or ``.json`` file, each
    other file as a whole.

    A blank line of a JSON-lines file is no document.

    Raises:
        DataError: If there is no document at all.
    """
    empty = True
    for path in files:
        if path.suffix not in _JSON_SUFFIXES:
            yield Record(str(path), 1, path.read_bytes(), is_json=False)
            empty = False
            continue
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield Record(str(path), number, line, is_json=True)
                    empty = False
    if empty:
        raise DataError(
            f"{', '.join(map(str, files))}: no document, only blank lines; set input to files with "
            "text"
        )
