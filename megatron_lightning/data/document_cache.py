"""Cache of tokenized documents: a folder for each source, named by all inputs to the documents."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from megatron_lightning.data.report import warning_of
from megatron_lightning.data.sft import Documents, Encoder
from megatron_lightning.data.sources import file_stamps, read_rows


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
        key = {"files": file_stamps([path]), "split": split, **encoder.identity}
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        folder = self._root() / name
        if Documents.are_in(folder):
            return Documents(folder), None
        rows = read_rows(path, split=self._split, subset=self._subset)
        documents = Documents.build(folder, encoder.documents(rows), encoder.counts)
        return documents, warning_of(path, documents)

    def _root(self) -> Path:
        if self._folder is not None:
            return Path(self._folder)
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(home) / "megatron_lightning" / "documents"
