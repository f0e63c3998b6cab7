"""Images of a document: grown placeholders in text, places among ids, and what is kept in files.

The growth of a placeholder is text. The text of a conversation grows, the characters of answers
shift, and everything behind (ids, marks, lengths, packing) sees no pixel.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_lightning.data.images.image_files import Size, named

Span = tuple[int, int]
Numbers = npt.NDArray[np.int64]
Grow = Callable[[Sequence[Size]], Sequence[str]]
"""Sizes of a document's images -> the text in the place of each."""
_KEPT = ("where", "size", "digest", "path", "at", "place")


@dataclass(frozen=True)
class StoredImage:
    """An image of a document."""

    where: str
    """Row and message, for messages."""
    size: Size
    """Height and width."""
    digest: str
    """Of the file's bytes."""
    path: str | None = None
    """The file. None: the bytes are in the cache."""
    at: Span = (0, 0)
    """First byte in the cache, and number of bytes."""
    place: Span = (0, 0)
    """Tokens in the document: the first one, and the one behind the last."""
    data: bytes | None = None
    """Bytes on their way into the cache."""


@dataclass(frozen=True)
class GrownText:
    """Text whose placeholders have grown."""

    text: str
    ends: Sequence[int]
    """Characters behind the placeholders, before the growth."""
    gains: Sequence[int]
    """Characters gained before the first end, behind it, behind the second …"""
    images: Sequence[Span]
    """Characters of each image, behind the growth."""

    @classmethod
    def of(cls, text: str, placeholder: str, growth: Sequence[str]) -> GrownText:
        """Return ``text`` with the n-th placeholder replaced by the n-th text of ``growth``."""
        pieces = text.split(placeholder) if growth else [text]
        grown, ends, gains, images = [pieces[0]], [], [0], []
        before, behind = len(pieces[0]), len(pieces[0])
        for image, piece in zip(growth, pieces[1:], strict=True):
            images.append((behind, behind + len(image)))
            before, behind = before + len(placeholder), behind + len(image)
            ends.append(before)
            gains.append(behind - before)
            grown += [image, piece]
            before, behind = before + len(piece), behind + len(piece)
        return cls("".join(grown), ends, gains, images)

    def shifted(self, character: int) -> int:
        """Return the place of a character behind the growth."""
        return character + self.gains[bisect_right(self.ends, character)]


@dataclass(frozen=True)
class DocumentImages:
    """Images of a document, and what their pixels are made from."""

    text: str
    """The document before the growth."""
    kept: Sequence[Span]
    """Ids of the grown text that the document has."""
    images: Sequence[StoredImage]
    read: Callable[[StoredImage], bytes] | None = None
    """Reads the bytes of an image."""

    @property
    def digests(self) -> str:
        """Digests of all images."""
        return "".join(image.digest for image in self.images)

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each image."""
        return [image.place[1] - image.place[0] for image in self.images]

    def is_image(self, length: int) -> npt.NDArray[np.bool_]:
        """Return whether each of ``length`` tokens belongs to an image."""
        marks = np.zeros(length, np.bool_)
        for image in self.images:
            marks[slice(*image.place)] = True
        return marks

    def kept_positions(self) -> Numbers:
        """Return the ids of the grown text that the document has, as numbers."""
        return np.concatenate([np.arange(begin, end) for begin, end in self.kept])

    def decoded(self, decode: Callable[[str, bytes], Any]) -> list[Any]:
        """Return the images as ``decode`` makes them of a place for messages and bytes.

        Raises:
            DataError: If a file is missing, broken, or another one than before.
        """
        if self.read is None:
            raise RuntimeError("documents have pictures when they are read from a cache")
        return [decode(named(image.where, image.path), self.read(image)) for image in self.images]

    def whole(self, keep: Numbers) -> Numbers:
        """Return the positions of ``keep`` without parts of images."""
        lost = self._lost(keep)
        return keep[~np.isin(keep, _positions(lost))] if lost else keep

    def cut(
        self, keep: Numbers, ids: npt.NDArray[Any], placeholder: str,
        encode: Callable[[str], npt.NDArray[Any]], grow: Grow,
    ) -> DocumentImages | None:  # fmt: skip
        """Return the images of the document cut to the positions ``keep``. None: without the lost
        images the text has other ids, so that the document cannot be made.

        Args:
            keep: Positions, with all or no tokens of an image.
            ids: Of the full document.
            placeholder: Text in the place of an image.
            encode: Text -> ids.
            grow: Grows placeholders.
        """
        lost = self._lost(keep)
        images = [image for image in self.images if image not in lost]
        text, positions = self.text, keep
        if lost:
            pieces = text.split(placeholder)
            text = pieces[0] + "".join(
                ("" if image in lost else placeholder) + piece
                for image, piece in zip(self.images, pieces[1:], strict=True)
            )
            remaining = np.ones(len(ids), np.bool_)
            remaining[_positions(lost)] = False
            positions = (np.cumsum(remaining) - 1)[keep]
            growth = grow([image.size for image in images]) if images else []
            made = encode(GrownText.of(text, placeholder, growth).text)
            if positions[-1] >= len(made) or not np.array_equal(made[positions], ids[keep]):
                return None
        places = [np.searchsorted(keep, image.place).tolist() for image in images]
        moved = [
            replace(image, place=(begin, end))
            for image, (begin, end) in zip(images, places, strict=True)
        ]
        return DocumentImages(text, _runs(positions), moved) if images else NO_IMAGES

    def _lost(self, keep: Numbers) -> list[StoredImage]:
        counts = [np.isin(np.arange(*image.place), keep).all() for image in self.images]
        return [image for image, kept in zip(self.images, counts, strict=True) if not kept]

    def dumps(self) -> bytes:
        """Return the record for a file."""
        images = [{name: getattr(image, name) for name in _KEPT} for image in self.images]
        fields = {"text": self.text, "kept": list(self.kept), "images": images}
        return json.dumps(fields, ensure_ascii=False).encode()

    @classmethod
    def loads(cls, data: bytes, read: Callable[[StoredImage], bytes]) -> DocumentImages:
        """Return the images of a record."""
        fields: dict[str, Any] = json.loads(data)
        images = [
            StoredImage(
                where=one["where"],
                size=(one["size"][0], one["size"][1]),
                digest=one["digest"],
                path=one["path"],
                at=(one["at"][0], one["at"][1]),
                place=(one["place"][0], one["place"][1]),
            )
            for one in fields["images"]
        ]
        kept = [(begin, end) for begin, end in fields["kept"]]
        return cls(fields["text"], kept, images, read)


NO_IMAGES = DocumentImages("", (), ())
"""Of a document that lost all images."""


def _positions(images: Sequence[StoredImage]) -> Numbers:
    return np.concatenate([np.arange(*image.place) for image in images])


def _runs(positions: Numbers) -> list[Span]:
    """Return rising numbers as runs."""
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(positions, breaks) if len(run)]
