"""Images of cached documents: a record for each document, and the bytes of images without a file.

Bytes out of rows and of the network are copied once, and mapped by all ranks of a node. Files in
folders of images stay where they are.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np

from megatron_lightning.data.images.document_images import DocumentImages, StoredImage
from megatron_lightning.data.images.image_files import MissingImageError, digest
from megatron_lightning.data.indexed.atomic_files import atomic_write
from megatron_lightning.errors import DataError

_RECORDS, _BOUNDS, _BYTES = "images.bin", "images.npy", "image_bytes.bin"


class ImageStore:
    """Images of the documents in a folder of the cache.

    Args:
        folder: Folder written by :class:`ImageWriter`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bounds = np.load(folder / _BOUNDS)

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Return whether documents in ``folder`` have images."""
        return (folder / _BOUNDS).is_file()

    def __getitem__(self, index: int) -> DocumentImages | None:
        """Return the images of a document. None: it has none."""
        begin, end = self._bounds[index : index + 2].tolist()
        if begin == end:
            return None
        return DocumentImages.loads(_part(self._folder / _RECORDS, begin, end - begin), self._read)

    def _read(self, image: StoredImage) -> bytes:
        """Return the bytes of an image, the same as when the documents were made.

        Raises:
            DataError: If the file is missing, or another one.
        """
        if image.path is None:
            data = _part(self._folder / _BYTES, *image.at)
        else:
            try:
                data = Path(image.path).read_bytes()
            except OSError as error:
                raise MissingImageError(
                    f"{image.where}: the image {image.path} was there when the documents were "
                    f"made, and cannot be read now ({error.strerror}); put it back"
                ) from error
        if digest(data) != image.digest:
            raise DataError(
                f"{image.where}: the image {image.path or 'in the cache'} has changed since the "
                f"documents were made; put the old one back, or remove {self._folder} to make the "
                "documents anew"
            )
        return data


class ImageWriter:
    """Writes the images of documents, in order. Documents without images leave no files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = ExitStack()
        self._records: IO[bytes] | None = None
        self._bytes: IO[bytes] | None = None
        self._bounds = [0]
        self._places: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> ImageWriter:
        return self

    def __exit__(self, *raised: object) -> None:
        self._files.__exit__(*raised)  # type: ignore[arg-type]
        if raised[0] is None and self._records is not None:
            with atomic_write(self._folder / _BOUNDS) as file:
                np.save(file, np.array(self._bounds, np.int64))

    def add(self, images: DocumentImages | None) -> None:
        """Add the images of the next document."""
        size = 0
        if images is not None and images.images:
            if self._records is None:
                self._records = self._files.enter_context(atomic_write(self._folder / _RECORDS))
            placed = [self._placed(image) for image in images.images]
            size = self._records.write(replace(images, images=placed).dumps())
        self._bounds.append(self._bounds[-1] + size)

    def _placed(self, image: StoredImage) -> StoredImage:
        if image.path is not None or image.data is None:
            return image
        if image.digest not in self._places:
            if self._bytes is None:
                self._bytes = self._files.enter_context(atomic_write(self._folder / _BYTES))
            self._places[image.digest] = (self._bytes.tell(), len(image.data))
            self._bytes.write(image.data)
        return replace(image, at=self._places[image.digest])


def _part(path: Path, begin: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(size)
