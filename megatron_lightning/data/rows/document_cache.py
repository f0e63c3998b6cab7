"""Cache of tokenized documents: a folder for each source, named by all inputs to the documents."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_lightning.data.chat.chat_encoding import MISSING, Encoder
from megatron_lightning.data.chat.documents import Documents
from megatron_lightning.data.indexed.atomic_files import atomic_write
from megatron_lightning.data.rows.row_report import warning_of
from megatron_lightning.data.rows.sources import Row, file_stamps, load_dataset, read_rows
from megatron_lightning.errors import ConfigError, DataError


class DocumentCache:
    """Tokenized documents of sources, kept in files.

    Args:
        folder: Folder of the cache. None: ``~/.cache/megatron_lightning``.
        split: Split of a data set of the package ``datasets``.
        subset: Configuration of a data set on the Hub.
    """

    def __init__(self, folder: str | None, *, split: str, subset: str | None) -> None:
        self._folder = folder
        self._split = split
        self._subset = subset

    def documents(self, path: str, encoder: Encoder) -> tuple[Documents, str | None]:
        """Return the documents of a source, made if missing from the cache, and a warning about
        documents made now. None: no warning.

        Args:
            path: The source.
            encoder: Makes documents of the source's rows.

        Raises:
            DataError: If a row cannot be used, with file and line.
        """
        split = (self._split, self._subset)
        stamps = file_stamps(path) or [[path, self._version(path)]]
        folder = self._root() / _digest({"files": stamps, "split": split, **encoder.identity})
        if Documents.are_in(folder):
            documents = Documents(folder)
            if not documents.report.get(MISSING):
                return documents, None
            warning = warning_of(path, documents)  # images may be there by now
            return documents, f"{warning} Remove {folder} to look for them again."
        documents = Documents.build(folder, encoder.documents(self.rows(path)), encoder.counts)
        return documents, warning_of(path, documents)

    def rows(self, path: str) -> Iterator[Row]:
        """Yield all rows of a source, of the split and subset of the data."""
        return read_rows(path, split=self._split, subset=self._subset)

    def look_up(self, path: str) -> None:
        """Note the version of a data set on the Hub that the ranks of this node read, newly
        downloaded if it has changed. Files need no note. Called by one rank of a node. Without a
        network, and with ``HF_HUB_OFFLINE``, the local copy's version is noted.

        Raises:
            DataError: If there is no such data set, and no version was noted before.
        """
        if file_stamps(path):
            return
        note = self._note(path)
        try:
            rows = load_dataset(path, split=self._split, subset=self._subset)
        except (ConfigError, DataError):
            if note.is_file():  # the documents may be there without the data set
                return
            raise
        note.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(note) as file:
            # The package's name of the content.
            file.write(str(rows._fingerprint).encode())

    def _version(self, path: str) -> str:
        note = self._note(path)
        if not note.is_file():
            self.look_up(path)
        return note.read_text()

    def _note(self, path: str) -> Path:
        name = _digest({"hub": path, "split": self._split, "subset": self._subset})
        return self._root() / f"{name}.version"

    def _root(self) -> Path:
        if self._folder is not None:
            return Path(self._folder)
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(home) / "megatron_lightning" / "documents"


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]
