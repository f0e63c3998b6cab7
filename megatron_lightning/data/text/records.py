"""Documents as read from files, decoded and parsed when a text is asked for. A record has a file
and a line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lightning.errors import DataError


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

    @property
    def num_bytes(self) -> int:
        """Size of the record."""
        return len(self.raw)

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
                f"{self.where}: invalid JSON at column {column}: {error.msg}. Each line must be "
                "one JSON object."
            ) from error
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{self.where}: unreadable JSON ({error}). Each line must be one JSON object."
            ) from error

    def fields(self) -> dict[str, Any]:
        """Return the fields of a line of JSON.

        Raises:
            DataError: If the record is undecodable, invalid JSON, or no object, with file and line.
        """
        fields = self.parsed()
        if not isinstance(fields, dict):
            raise DataError(
                f"{self.where}: found a {type(fields).__name__}. Each line must be a JSON object "
                "with a text."
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
        names = (
            f"{type(value).__name__} under key {key!r}"
            if key in fields
            else f"no key {key!r}, only {sorted(fields)}"
        )
        raise DataError(
            f"{self.where}: {names}; set json_keys to keys that hold text in every line"
        )


@dataclass(frozen=True)
class Row(Record):
    """A row of a table."""

    raw: bytes = b""
    is_json: bool = True
    values: Mapping[str, Any] = field(default_factory=dict)
    """The fields."""

    def fields(self) -> dict[str, Any]:
        """Return the fields of the row."""
        return dict(self.values)

    @property
    def num_bytes(self) -> int:
        """Size of the row's texts."""
        return sum(len(value) for value in self.values.values() if isinstance(value, str))
