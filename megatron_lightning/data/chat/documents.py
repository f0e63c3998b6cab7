"""Tokenized documents, kept in files mapped by all ranks of a node.

A document has ids [n] and, for each id, whether the prediction of the id counts in the loss.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_lightning.data.images.document_images import DocumentImages
from megatron_lightning.data.images.image_store import ImageStore, ImageWriter
from megatron_lightning.data.indexed.atomic_files import atomic_write
from megatron_lightning.errors import DataError

_IDS, _TRAINED, _REPORT = "ids.bin", "trained.bin", "report.json"
_BOUNDS, _ROWS = "bounds.npy", "rows.npy"
Marks = npt.NDArray[np.bool_]


class Document(NamedTuple):
    """A sample."""

    ids: npt.NDArray[np.int32]
    """[n]."""
    trained: Marks
    """Whether each id is predicted [n]. The first id never is."""
    row: int = 0
    """Number of the document's row in the source."""
    images: DocumentImages | None = None


class Documents(Sequence[Document]):
    """Documents in files mapped into memory.

    Args:
        folder: Folder written by :meth:`build`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        report = json.loads((folder / _REPORT).read_text())
        self.report: dict[str, int] = report["counts"]
        """Row counts by outcome."""
        self.digest: str = report["digest"]
        """Of all ids, marks and images."""
        self.rows: npt.NDArray[np.int64] = np.load(folder / _ROWS)
        """Number of each document's row in the source [D]."""
        self._bounds = np.load(folder / _BOUNDS)
        self._ids = _mapped(folder / _IDS, np.dtype(np.int32))
        self._trained = _mapped(folder / _TRAINED, np.dtype(np.bool_))
        self._images = ImageStore(folder) if ImageStore.is_in(folder) else None

    @classmethod
    def build(cls, folder: Path, documents: Iterable[Document], counts: Counter[str]) -> Documents:
        """Write documents into ``folder``. Several processes may do so at once.

        Args:
            folder: Is made.
            documents: Documents, read once and in turn.
            counts: Row counts by outcome, complete when all documents are read.

        Raises:
            DataError: If the folder cannot be made.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"{folder}: documents cannot be cached here ({error.strerror}). Set cache_dir to a "
                "folder that can be written."
            ) from error
        bounds, rows, digest = [0], [], hashlib.sha256()
        with (
            atomic_write(folder / _IDS) as ids,
            atomic_write(folder / _TRAINED) as trained,
            ImageWriter(folder) as images,
        ):
            for document in documents:
                for file, array in zip((ids, trained), document[:2], strict=True):
                    data = array.tobytes()
                    file.write(data)
                    digest.update(data)
                bounds.append(bounds[-1] + len(document.ids))
                rows.append(document.row)
                images.add(document.images)
                if document.images is not None:
                    digest.update(document.images.digests.encode())
        for name, numbers in ((_BOUNDS, bounds), (_ROWS, rows)):
            with atomic_write(folder / name) as file:
                np.save(file, np.array(numbers, np.int64))
        # By the digest, of images as well, checkpoints say which data was read.
        digest.update(np.array(bounds, np.int64).tobytes())
        with atomic_write(folder / _REPORT) as file:  # written last: marks the folder as complete
            report = {"counts": dict(counts), "digest": digest.hexdigest()}
            file.write(json.dumps(report, indent=1).encode())
        return cls(folder)

    @staticmethod
    def are_in(folder: Path) -> bool:
        """Return whether :meth:`build` has completely written ``folder``."""
        return (folder / _REPORT).is_file()

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of every document [D]."""
        return np.asarray(np.diff(self._bounds), np.int64)

    @property
    def image_tokens(self) -> list[list[int]] | None:
        """Tokens of each image of every document. None: no document has images."""
        if self._images is None:
            return None
        found = map(self._images.__getitem__, range(len(self)))
        return [[] if one is None else one.num_tokens for one in found]

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        part = slice(self._bounds[index], self._bounds[index + 1])
        images = None if self._images is None else self._images[index]
        return Document(self._ids[part], self._trained[part], images=images)

    def __reduce__(self) -> tuple[object, ...]:
        # a loader's worker maps the files again instead of receiving their bytes
        return (type(self), (self.folder,))


def _mapped(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if not path.stat().st_size:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r").view(np.ndarray)
