"""Rendered conversations with images as longer text, and the tokens of their images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_lightning.data.images.document_images import (
    DocumentImages,
    GrownText,
    Span,
    StoredImage,
)
from megatron_lightning.data.images.image_files import ImageFiles, digest, named
from megatron_lightning.data.images.image_options import ImageOptions
from megatron_lightning.data.images.image_parts import (
    WORDS,
    ImageSource,
    image_column,
    with_article,
)
from megatron_lightning.data.images.image_processor import ImageProcessor
from megatron_lightning.errors import DataError

_OPTION: Mapping[str, str] = {"image": "images", "audio": "audio"}
"""Kind of a medium -> the option of the data."""


@dataclass(frozen=True)
class TextImages:
    """Images of a text whose placeholders have grown."""

    before: str
    """The text before the growth."""
    images: Sequence[StoredImage]
    spans: Sequence[Span]
    """Characters of each image."""

    def in_document(self, begins: npt.NDArray[np.int64]) -> DocumentImages:
        """Return the images of the document with all tokens of the text.

        Args:
            begins: First character of each token [n].
        """
        placed = [
            replace(
                image,
                place=(int(np.searchsorted(begins, begin)), int(np.searchsorted(begins, end))),
            )
            for image, (begin, end) in zip(self.images, self.spans, strict=True)
        ]
        return DocumentImages(self.before, [(0, len(begins))], placed)


class ImageEncoder:
    """Images in the rows of one source.

    Args:
        processor: Of the model.
        folder: Folder of the source's image files. None: rows name no files.
        options: The user's options.
    """

    def __init__(
        self, processor: ImageProcessor, folder: Path | None, options: ImageOptions
    ) -> None:
        self.processor = processor
        self._files = ImageFiles(folder, remote=options.remote)
        self._options = options

    @property
    def identity(self) -> dict[str, Any]:
        """All inputs to images and their tokens, beside the rows."""
        return {
            "options": {**asdict(self._options), "folder": str(self._files.folder)},
            "processor": self.processor.identity,
        }

    @property
    def drops_missing(self) -> bool:
        """Whether rows are left out if an image is missing."""
        return self._options.missing == "drop"

    def check_words(self, where: str, text: str) -> None:
        """Check that a text has no place of an image as words.

        Raises:
            DataError: If it has.
        """
        found = next((word for word in self.processor.words if word in text), None)
        if found is not None:
            raise DataError(
                f"{where} has {found} as words, which {self.processor.name} reads as "
                f"{with_article(self._options.kind)}; write it as a part of the type "
                f"{self._options.kind}, and other words here"
            )

    def check_without(
        self, where: str, fields: Mapping[str, Any], text: str, ids: Sequence[int]
    ) -> None:
        """Check that a row that is no conversation has no image.

        Args:
            where: The row.
            fields: Fields of the row.
            text: Its text.
            ids: Its ids.

        Raises:
            DataError: If the row has an image, or a place for one.
        """
        column, _ = image_column(where, fields)
        if column:
            raise DataError(
                f"{where}: the row has {column} beside text that no template renders; write the "
                "row as a conversation, with messages"
            )
        self.check_words(where, text)
        if found := set(self.processor.word_ids).intersection(ids):
            raise DataError(
                f"{where}: input_ids has id {min(found)} of {with_article(self._options.kind)}, "
                "and a tokenized row has none; write the row as a conversation"
            )

    def grown(
        self, where: str, text: str, sources: Sequence[ImageSource]
    ) -> tuple[GrownText, TextImages]:
        """Return the text with grown placeholders, and its images.

        Raises:
            DataError: If an image cannot be read, or the text has another number of places.
        """
        placeholder = self.processor.placeholder
        num_places = text.count(placeholder)
        if num_places != len(sources):
            raise DataError(
                f"{where}: the text of the conversation has {num_places} places {placeholder} for "
                f"{len(sources)} {WORDS[self._options.kind]}s; leave the place out of other words, "
                "such as tools"
            )
        self._check_kinds(sources)
        images = [self._stored(source) for source in sources]
        growth = self.processor.growth([image.size for image in images]) if images else []
        grown = GrownText.of(text, placeholder, growth)
        return grown, TextImages(text, images, grown.images)

    def _check_kinds(self, sources: Sequence[ImageSource]) -> None:
        kind = self._options.kind
        other = next((one for one in sources if one.kind != kind), None)
        if other is not None:
            raise DataError(
                f"{other.where} has {with_article(other.kind)}, and these data have "
                f"{WORDS[kind]}s; leave the row out, or set {_OPTION[other.kind]} of "
                f"FinetuneDataModule instead of {_OPTION[kind]}"
            )

    def _stored(self, source: ImageSource) -> StoredImage:
        data, path = self._files.read(source)
        where = named(source.where, path)
        size = self.processor.medium.size_of(where, data)
        self.processor.check_size(where, size)
        kept = data if path is None else None
        return StoredImage(source.where, size, digest(data), path, data=kept)
