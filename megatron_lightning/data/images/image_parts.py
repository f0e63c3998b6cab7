"""Images of a row: parts of messages, and columns of images beside ``<image>`` in texts.

Nothing is opened here. A source is what the row says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_lightning.errors import DataError

IMAGE = "\ufdd0"
"""Character at the place of an image in the content of a message. Unicode leaves it to programs."""
TAG = "<image>"
"""Place of an image in the texts of rows with a column of images (LLaVA, ShareGPT)."""
SOUND_TAG = "<audio>"
"""Place of a sound in the texts of rows with a column of sounds."""
TYPES: Mapping[str, str] = {
    "image": "image", "image_url": "image", "input_image": "image",
    "audio": "audio", "audio_url": "audio", "input_audio": "audio",
}  # fmt: skip
"""Type of a part -> the kind of its medium."""
WORDS: Mapping[str, str] = {"image": "image", "audio": "sound"}
"""Kind -> word in messages."""
_COLUMNS: Mapping[str, str] = {
    "image": "image", "images": "image", "audio": "audio", "audios": "audio"
}  # fmt: skip
_KEYS = ("image", "image_url", "audio", "audio_url", "input_audio", "url", "path", "bytes")


def with_article(kind: str) -> str:
    """Return the word of a kind with its article."""
    return {"image": "an image", "audio": "a sound"}[kind]


@dataclass(frozen=True)
class ImageSource:
    """An image as named in a row."""

    where: str
    """Row and message, for messages."""
    address: str | None = None
    """Path, data URL or web address."""
    data: bytes | None = None
    """The file's bytes, of rows that hold images."""
    kind: str = "image"
    """``image``, or ``audio`` for a sound."""

    @property
    def label(self) -> str:
        """Row, message and kind, for messages."""
        return f"{self.where}: the {self.kind}"


class RowImages:
    """Images of a row, in the order of their places.

    Args:
        where: File and line of the row.
        fields: Fields of the row.

    Raises:
        DataError: If a column holds something else.
    """

    def __init__(self, where: str, fields: Mapping[str, Any]) -> None:
        self._where = where
        self.sources: list[ImageSource] = []
        """Images with a place so far."""
        self._column, values = image_column(where, fields)
        self._left = deque(values)
        self._kind = _COLUMNS.get(self._column, "image")

    def placed(self, index: int, content: str) -> str:
        """Return the text of a message, with a character in the place of every image."""
        if not self._column:
            return content
        tag = TAG if self._kind == "image" else SOUND_TAG
        for _ in range(content.count(tag)):
            self._place_next(index, self._kind)
        return content.replace(tag, IMAGE)

    def part(self, index: int, part: Mapping[str, Any]) -> str:
        """Return the character in the place of a part with an image."""
        value = next((part[key] for key in _KEYS if part.get(key) is not None), None)
        if value is None:
            self._place_next(index, TYPES[part["type"]])
        else:
            self._add(index, value, TYPES[part["type"]])
        return IMAGE

    @property
    def num_left(self) -> int:
        """Number of images of the column without a place."""
        return len(self._left)

    def _place_next(self, index: int, kind: str) -> None:
        if not self._left:
            raise DataError(
                f"{self._where}: message {index} has a place for {with_article(kind)}, and none is "
                f"left for it in {self._column or 'the row'}; add the {kind}, or remove the place"
            )
        self._add(index, self._left.popleft(), self._kind)

    def _add(self, index: int, value: Any, kind: str) -> None:
        where = f"{self._where}: message {index}"
        self.sources.append(replace(_source(where, value), kind=kind))


def image_column(where: str, fields: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Return the name and the images of the row's column of images. Empty: there is none.

    Raises:
        DataError: If several columns have images.
    """
    found = [name for name in _COLUMNS if fields.get(name) not in (None, "", [])]
    if len(found) > 1:
        raise DataError(
            f"{where} has images in the columns {' and '.join(found)}, and their order is unknown; "
            "put them into one list, images"
        )
    if not found:
        return "", []
    value = fields[found[0]]
    return found[0], list(value) if isinstance(value, list | tuple) else [value]


def has_images(fields: Mapping[str, Any]) -> bool:
    """Return whether a row with messages has images."""
    parts = [
        part
        for message in fields.get("messages") or ()
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
    ]
    is_part = any(isinstance(part, Mapping) and part.get("type") in TYPES for part in parts)
    return is_part or any(fields.get(name) not in (None, "", []) for name in _COLUMNS)


def _source(where: str, value: Any) -> ImageSource:
    if isinstance(value, Mapping):
        if isinstance(value.get("bytes"), bytes):
            return ImageSource(where, data=value["bytes"])
        if isinstance(value.get("data"), str):  # input_audio of OpenAI
            return ImageSource(where, address=f"data:audio/wav;base64,{value['data']}")
        value = next((value[key] for key in ("url", "path") if value.get(key)), value)
    if isinstance(value, bytes):
        return ImageSource(where, data=value)
    if isinstance(value, str) and value:
        return ImageSource(where, address=value)
    raise DataError(
        f"{where} has an image of the type {type(value).__name__}; write a path, a data URL, or an "
        "object with bytes"
    )
