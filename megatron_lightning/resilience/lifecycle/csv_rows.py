"""The file ``metrics.csv`` of Lightning's CSVLogger over several starts.

Lightning deletes the file of an equal version. Here the logger appends, and rows of steps trained
again go to a file beside. No row is deleted.
"""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from fsspec.core import url_to_fs

_FILE = "metrics.csv"
_ASIDE = "metrics.csv.before"  # while Lightning's logger opens the folder
_HYPER_PARAMETERS = "hparams.yaml"


class CsvLog(Protocol):
    """Lightning's CSVLogger."""

    @property
    def log_dir(self) -> str:
        """Folder or URL of the file."""
        ...

    @property
    def experiment(self) -> Any:
        """Writer of rows, with the columns in ``metrics_keys``."""
        ...

    def save(self) -> None:
        """Write the rows so far."""
        ...


class CsvRows:
    """Rows of a logger that were written before this start. Only rank 0 has one.

    Args:
        logger: Writes to a local folder or a URL.
    """

    def __init__(self, logger: CsvLog) -> None:
        self._logger = logger
        self._files, self._folder = url_to_fs(logger.log_dir)
        self._num_rows = 0
        self._hyper_parameters = ""

    def open(self) -> None:
        """Begin to log, and keep the rows and hyper-parameters of earlier starts."""
        file, aside = self._path(_FILE), self._path(_ASIDE)
        self._hyper_parameters = self._read(_HYPER_PARAMETERS)
        if self._files.isfile(aside):  # a start that ended while the file was aside
            self._write(_ASIDE, _united([_rows(self._read(_ASIDE)), _rows(self._read(_FILE))]))
        elif self._files.isfile(file):
            self._files.mv(file, aside)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*exists and is not empty.*will be deleted")
            experiment = self._logger.experiment
        if not self._files.isfile(aside):
            return
        text = self._read(_ASIDE)
        rows = _rows(text)
        if rows and text[-1] not in "\r\n":  # a row cut off by the end of the process
            self._write(_ASIDE, rows)
        self._files.mv(aside, file)
        self._num_rows = max(0, len(rows) - 1)
        experiment.metrics_keys = rows[0] if rows else []

    def count(self) -> None:
        """Count the rows of a logger that logs already, before a resumed fit adds more."""
        self._logger.save()
        self._num_rows = max(0, len(_rows(self._read(_FILE))) - 1)
        self._hyper_parameters = self._read(_HYPER_PARAMETERS)

    def put_behind(self, step: int) -> str | None:
        """Move the earlier rows of ``step`` and later steps into a file beside.

        Returns:
            The file, if there are such rows.
        """
        self._logger.save()
        header, *rows = _rows(self._read(_FILE)) if self._num_rows else [[]]
        earlier, own = rows[: self._num_rows], rows[self._num_rows :]
        self._num_rows = 0
        place = header.index("step") if "step" in header else None
        behind = [row for row in earlier if _step_of(row, place) >= step]
        if not behind:
            return None
        name = self._free_name(f"{_FILE}.behind-{step}")
        self._write(name, [header, *behind])
        if self._hyper_parameters not in ("", self._read(_HYPER_PARAMETERS)):
            self._put(self._free_name(f"{_HYPER_PARAMETERS}.behind-{step}"), self._hyper_parameters)
        left = [row for row in earlier if _step_of(row, place) < step] + own
        if left:
            self._write(_FILE, [header, *left])
        else:  # a new log, with columns of its own
            self._files.rm_file(self._path(_FILE))
            self._logger.experiment.metrics_keys = []
        return self._path(name)

    def _path(self, name: str) -> str:
        return f"{self._folder.rstrip('/')}/{name}"

    def _free_name(self, name: str) -> str:
        number, free_name = 1, name
        while self._files.exists(self._path(free_name)):
            number += 1
            free_name = f"{name}.{number}"
        return free_name

    def _read(self, name: str) -> str:
        path = self._path(name)
        if not self._files.isfile(path):
            return ""
        content: bytes = self._files.cat_file(path)
        return content.decode(errors="replace")

    def _write(self, name: str, rows: Sequence[Sequence[str]]) -> None:
        text = io.StringIO(newline="")
        csv.writer(text).writerows(rows)
        self._put(name, text.getvalue())

    def _put(self, name: str, text: str) -> None:
        partial = self._path(f"{name}.partial")
        self._files.pipe_file(partial, text.encode())
        self._files.mv(partial, self._path(name))


def _rows(text: str) -> list[list[str]]:
    """Return the lines of a file, with the header as the first line."""
    return [row for row in csv.reader(io.StringIO(text, newline="")) if row]


def _united(tables: Sequence[list[list[str]]]) -> list[list[str]]:
    """Return the rows of several tables under one header."""
    header = sorted({key for table in tables for key in (table[0] if table else ())})
    rows = [
        dict(zip(table[0], row, strict=False)) for table in tables if table for row in table[1:]
    ]
    return [header, *([row.get(key, "") for key in header] for row in rows)] if header else []


def _step_of(row: Sequence[str], place: int | None) -> float:
    """Return the step of a row. A row without a step counts as of step 0."""
    if place is not None and place < len(row):
        with suppress(ValueError):
            return float(row[place])
    return 0.0
