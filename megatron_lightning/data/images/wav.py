"""Sounds in WAV files: integers of 8 to 32 bits, and floating-point samples."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_lightning.errors import DataError

_INTEGERS, _FLOATS, _EXTENSIBLE = 1, 3, 0xFFFE
_TYPES: Mapping[tuple[int, int], str] = {
    (_INTEGERS, 1): "u1", (_INTEGERS, 2): "<i2", (_INTEGERS, 3): "<i4", (_INTEGERS, 4): "<i4",
    (_FLOATS, 4): "<f4", (_FLOATS, 8): "<f8",
}  # fmt: skip
"""Coding and bytes of a sample -> type. Three bytes are widened to four."""
_UNKNOWN_SIZE = 0x7FFF_0000  # or above: written to a pipe


class Wav(NamedTuple):
    """The header of a file."""

    coding: int
    width: int
    """Bytes of a sample of a channel."""
    channels: int
    rate: int
    """Samples of a second."""
    start: int
    """First byte of the samples."""
    length: int
    """Number of samples of each channel."""

    def samples(self, data: bytes) -> npt.NDArray[np.float32]:
        """Return the samples, in [-1, 1] if they are integers, the mean over the channels [n]."""
        count = self.length * self.channels
        content = data[self.start : self.start + count * self.width]
        if self.width == 3:
            parts = np.frombuffer(content, np.uint8).reshape(-1, 3)
            content = np.pad(parts, ((0, 0), (1, 0))).tobytes()
        kind = _TYPES[self.coding, self.width]
        with np.errstate(over="ignore"):  # such samples are infinite, and the caller refuses them
            values = np.frombuffer(content, kind).astype(np.float32).reshape(-1, self.channels)
        if self.width == 1:
            values -= 128
        mean: npt.NDArray[np.float32] = values.mean(1)
        width = 4 if self.width == 3 else self.width
        return mean if self.coding == _FLOATS else mean / np.float32(2 ** (8 * width - 1))


def wav_of(where: str, data: bytes) -> Wav | None:
    """Return the header of a file. None: it is no WAV file, or its samples are compressed.

    Args:
        where: The row, for messages.
        data: The file.

    Raises:
        DataError: If the file is cut.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return None
    place, form = 12, b""
    while place + 8 <= len(data):
        name, size = data[place : place + 4], int.from_bytes(data[place + 4 : place + 8], "little")
        place += 8
        if name == b"fmt ":
            form = data[place : place + size]
        if name == b"data" and len(form) >= 16:
            return _of_parts(where, form, place, size, len(data) - place)
        place += size + size % 2
    raise DataError(f"{where}: the WAV file ends before its samples; write the whole file")


def _of_parts(where: str, form: bytes, place: int, size: int, there: int) -> Wav | None:
    coding, channels, rate, _, _, bits = struct.unpack("<HHIIHH", form[:16])
    if coding == _EXTENSIBLE and len(form) >= 26:
        coding = int.from_bytes(form[24:26], "little")
    width = bits // 8
    if (coding, width) not in _TYPES or bits % 8 or not channels:
        return None
    if size >= _UNKNOWN_SIZE:
        size = there
    if size > there:
        raise DataError(
            f"{where}: the WAV file is cut: its header says {size:,} bytes of samples, and "
            f"{there:,} are there; write the whole file"
        )
    return Wav(coding, width, channels, rate, place, size // (width * channels))
