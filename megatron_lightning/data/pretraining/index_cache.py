"""Arrays of a dataset's samples on disk: built once, named by a digest of all inputs, and mapped by
every process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_lightning.data.indexed.atomic_files import atomic_write
from megatron_lightning.data.indexed.remote import written_path
from megatron_lightning.errors import DataError

Array = npt.NDArray[Any]


def digest_of(description: str) -> str:
    """Return the md5 of a description in hexadecimal: Megatron's name of cached indices."""
    return hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()


class IndexCache:
    """Cached arrays of a dataset. Several processes or nodes may build the arrays at once.

    Args:
        folder: Folder of the files.
        stem: Start of the names of the files. Holds a digest of ``description``.
        description: All inputs to the arrays.
        data_time: Modification time of the data. Older arrays belong to replaced data.
    """

    def __init__(self, folder: str | Path, stem: str, description: str, data_time: float) -> None:
        self._folder = Path(written_path(str(folder), "cache_dir"))
        self._stem = stem
        self._description = description
        self._data_time = data_time

    def path(self, name: str) -> Path:
        """Return the file of an array or of the description."""
        return self._folder / f"{self._stem}-{name}"

    def load_or_build(
        self,
        names: Sequence[str],
        build: Callable[[], Mapping[str, Array]],
        has_shapes: Callable[[Sequence[Array]], bool],
    ) -> list[Array]:
        """Return the arrays, memory-mapped.

        Args:
            names: Names of the arrays.
            build: Builds the arrays.
            has_shapes: Whether cached arrays have the expected shapes.

        Raises:
            DataError: If the folder cannot be written or read.
        """
        cached = self._load(names, has_shapes, self._data_time)
        if cached is None:
            self._store(build())
            cached = self._load(names, has_shapes, not_before=0.0)
        if cached is None:
            raise DataError(
                f"{self.path('*')}: unreadable just after it was written; set cache_dir to "
                "another folder"
            )
        return cached

    def _load(
        self,
        names: Sequence[str],
        has_shapes: Callable[[Sequence[Array]], bool],
        not_before: float,
    ) -> list[Array] | None:
        """Map the cached arrays. None if an array is missing, unreadable, outdated or of another
        shape.
        """
        arrays = []
        for name in names:
            path = self.path(f"{name}.npy")
            try:
                # Indexing a memmap object takes three times as long.
                arrays.append(np.load(path, mmap_mode="r").view(np.ndarray))
                outdated = path.stat().st_mtime < not_before
            except (OSError, ValueError, EOFError):
                return None
            if outdated:
                return None
        return arrays if has_shapes(arrays) else None

    def _store(self, arrays: Mapping[str, Array]) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for name, array in arrays.items():
                with atomic_write(self.path(f"{name}.npy")) as file:
                    np.save(file, array)
            with atomic_write(self.path("description.txt")) as file:
                file.write(self._description.encode())
        except OSError as error:
            raise DataError(
                f"{self._folder}: the index cache cannot be written ({error.strerror}); set "
                "cache_dir to another folder"
            ) from error
