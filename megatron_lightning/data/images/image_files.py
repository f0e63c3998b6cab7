"""Bytes of images: from a folder, from rows, or downloaded once. Pictures from bytes.

Only a folder's own files are opened, and a web address only if asked for. Every size is read from
the header, before any pixel is decoded.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lightning.data.images.image_parts import ImageSource
from megatron_lightning.errors import DataError
from megatron_lightning.optional import require

MAX_PIXELS = 89_478_485
"""Most pixels of an image, as many as Pillow takes for harmless."""
_MAX_DOWNLOAD = 64 << 20
_SCHEME = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]*:(?=//)|^data:", re.IGNORECASE)
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that Pillow reads by itself. Others are never tried: Pillow gives PostScript to another
program, and the bytes may be a client's."""
_ROTATED = (5, 6, 7, 8)
"""Orientations of EXIF that swap height and width."""
Size = tuple[int, int]
"""Height and width."""


class MissingImageError(DataError):
    """An image file that does not exist."""


class ImageFiles:
    """Images of one source of rows.

    Args:
        folder: Folder of image files. None: the source has none.
        remote: Whether web addresses are downloaded.
    """

    def __init__(self, folder: Path | None, *, remote: bool = False) -> None:
        self.folder = None if folder is None else folder.resolve()
        self._remote = remote

    def read(self, source: ImageSource) -> tuple[bytes, str | None]:
        """Return the bytes of an image, and the path of its file. None: the bytes have no file.

        Raises:
            DataError: If they cannot be had, with row and message.
        """
        if source.data is not None:
            return source.data, None
        address = source.address or ""
        scheme = _SCHEME.match(address)
        if scheme is None:
            path = self._path_of(source, address)
            try:
                return path.read_bytes(), str(path)
            except FileNotFoundError as error:
                raise MissingImageError(
                    f"{source.where}: there is no {source.kind} {path}; mend the path, or set "
                    "folder of the options to where the files are"
                ) from error
            except OSError as error:
                raise DataError(
                    f"{source.label} {path} cannot be read ({error.strerror})"
                ) from error
        if scheme.group().lower() == "data:":
            return decoded_url(source.where, address), None
        return self._downloaded(source, address), None

    def _path_of(self, source: ImageSource, name: str) -> Path:
        """Return the path of a file in the folder.

        Raises:
            DataError: If it leads out of the folder, by a link as well.
        """
        if self.folder is None:
            raise DataError(
                f"{source.label} is named by the path {name[:80]!r}, and these rows have "
                "no folder beside them; set folder of the options"
            )
        try:
            path = (self.folder / name).resolve()
        except (ValueError, OSError) as error:
            raise DataError(f"{source.label} {name[:80]!r} is no path ({error})") from error
        if not path.is_relative_to(self.folder):
            raise DataError(
                f"{source.label} {name!r} is outside of {self.folder}; set folder of the "
                "options to one that holds all files"
            )
        return path

    def _downloaded(self, source: ImageSource, address: str) -> bytes:
        scheme = address.partition(":")[0].lower()
        if scheme not in ("http", "https"):
            raise DataError(
                f"{source.label} has an address of the kind {scheme}://; write a path in the "
                "folder of the files, or a data URL"
            )
        if not self._remote:
            raise DataError(
                f"{source.label} is at {address[:80]!r}, and nothing is downloaded; set "
                "remote=True of the options to download the files once, before the run"
            )
        from urllib.request import urlopen

        try:
            with urlopen(address, timeout=60) as answer:
                data: bytes = answer.read(_MAX_DOWNLOAD + 1)
        except (OSError, ValueError) as error:
            raise MissingImageError(
                f"{source.label} {address[:80]!r} cannot be downloaded ({error})"
            ) from error
        if len(data) > _MAX_DOWNLOAD:
            raise DataError(
                f"{source.label} {address[:80]!r} has more than {_MAX_DOWNLOAD >> 20} MiB"
            )
        return data


def decoded_url(where: str, url: str) -> bytes:
    """Return the bytes of a data URL.

    Raises:
        DataError: If it is none of an image in base64.
    """
    head, _, content = url.partition(",")
    is_medium = head.lower().startswith(("data:image/", "data:audio/"))
    if not is_medium or not head.lower().endswith(";base64"):
        raise DataError(
            f"{where}: a data URL begins with {head[:40]!r}; write data:image/png;base64,… with "
            "the type of the file (data:audio/wav)"
        )
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{where}: a data URL is no base64 ({error})") from error


def named(where: str, path: str | None) -> str:
    """Return a row and message with the path of an image."""
    return where if path is None else f"{where}: {path}"


def digest(data: bytes) -> str:
    """Return a name of an image's bytes."""
    return hashlib.sha256(data).hexdigest()[:32]


def size_of(where: str, data: bytes) -> Size:
    """Return height and width of the upright picture, from the header.

    Raises:
        DataError: If the bytes are no image, or the picture is too large.
    """
    with _opened(where, data) as image:
        width, height = image.size
        return (width, height) if _orientation(image) in _ROTATED else (height, width)


def picture(where: str, data: bytes) -> Any:
    """Return the upright picture of Pillow, in RGB.

    Raises:
        DataError: If the bytes are no image, or the picture is too large.
    """
    from PIL import Image, ImageOps

    with _opened(where, data) as image:
        upright = image if _orientation(image) == 1 else ImageOps.exif_transpose(image)
        if upright.mode.startswith("I"):  # 16 bits a pixel; a conversion would cut them off
            values = np.asarray(upright).astype(np.int64) // 257
            return Image.fromarray(values.clip(0, 255).astype(np.uint8)).convert("RGB")
        return upright.convert("RGB")


def _orientation(image: Any) -> int:
    """Return the orientation in EXIF. Pillow would decode a PNG to look for EXIF behind pixels."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    return int(image.getexif().get(0x0112, 1))


@contextmanager
def _opened(where: str, data: bytes) -> Iterator[Any]:
    """Open an image. Its pixels are not decoded yet."""
    require("PIL", "images", "pip install pillow")
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            if image.size[0] * image.size[1] > MAX_PIXELS:
                raise DataError(
                    f"{where}: an image has {image.size[0]} x {image.size[1]} pixels, more than "
                    f"{MAX_PIXELS:,}; make it smaller"
                )
            yield image
    except DataError:
        raise
    except (
        OSError, SyntaxError, ValueError, EOFError, ArithmeticError, TypeError,
        Image.DecompressionBombError,
    ) as error:  # fmt: skip  # EXIF may hold any value
        raise DataError(
            f"{where}: an image cannot be decoded ({error}); images are {', '.join(_FORMATS)}"
        ) from error
