"""Kinds of media in conversations: what rows and processors call them, and how a file becomes an
input.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_lightning.data.images.image_files import Size, picture, size_of
from megatron_lightning.data.images.wav import wav_of
from megatron_lightning.errors import DataError
from megatron_lightning.optional import require

_LOUDEST = 1000
"""Largest sample. Floating-point samples that nobody normalized are a little above 1."""


@dataclass(frozen=True)
class Medium:
    """A kind of media. Sizes are height and width of images, and samples and rate of sounds."""

    part: str
    """Part of the processor that makes the inputs."""
    argument: str
    """Argument of the processor."""
    token: str
    """Attribute of the processor with the placeholder."""
    probes: tuple[Size, Size]
    """Sizes of blank inputs."""
    blank: Callable[[Size], Any]
    """Returns a blank input."""
    size_of: Callable[[str, bytes], Size]
    """Returns the size of a file from its header."""
    decoded: Callable[[str, bytes], Any]
    """Returns the input of a file."""
    cheap: Sequence[tuple[Callable[[Size], Any], Mapping[str, Any]]] = ()
    """Other blank inputs, and settings of the processor that change values alone and save most of
    their cost: the cheapest first."""


def _blank_picture(size: Size, mode: str = "RGB") -> Any:
    from PIL import Image

    return Image.new(mode, (size[1], size[0]))


def _gray_picture(size: Size) -> Any:
    return _blank_picture(size, "L")  # a third of the values


def _blank_sound(size: Size) -> npt.NDArray[np.float32]:
    return np.zeros(size[0], np.float32)


def sound_size(where: str, data: bytes) -> Size:
    """Return the number of samples and the samples of a second.

    Raises:
        DataError: If the bytes are no sound, or the file is cut.
        MissingPackageError: If the file needs the package soundfile.
    """
    if (wav := wav_of(where, data)) is not None:
        return wav.length, wav.rate
    with _opened(where, data) as file:
        return file.frames, file.samplerate


def sound(where: str, data: bytes) -> npt.NDArray[np.float32]:
    """Return the samples of a sound in [-1, 1], the mean over its channels [n].

    Raises:
        DataError: If the bytes are no sound, the file is cut, or a sample is no such number.
        MissingPackageError: If the file needs the package soundfile.
    """
    wav = wav_of(where, data)
    samples = _decoded(where, data) if wav is None else wav.samples(data)
    if not (np.abs(samples) <= _LOUDEST).all():  # NaN too
        raise DataError(
            f"{where}: a sound has samples that are not finite, or above {_LOUDEST}, and samples "
            "of floating-point numbers are in [-1, 1]; write the file again"
        )
    return samples


def _decoded(where: str, data: bytes) -> npt.NDArray[np.float32]:
    """Return the samples of a sound by the package soundfile, the mean over its channels [n]."""
    with _opened(where, data) as file:
        try:
            samples: npt.NDArray[np.float32] = file.read(dtype="float32", always_2d=True)
        except Exception as error:  # the header alone is whole
            raise _not_decoded(where, error) from error
    return np.ascontiguousarray(samples.mean(1))


def _opened(where: str, data: bytes) -> Any:
    """Return an opened file of the package soundfile."""
    soundfile = require(
        "soundfile", f"{where}: a sound that is no WAV file of integers or floating-point samples"
    )
    try:
        return soundfile.SoundFile(io.BytesIO(data))
    except Exception as error:
        raise _not_decoded(where, error) from error


def _not_decoded(where: str, error: Exception) -> DataError:
    return DataError(f"{where}: a sound cannot be decoded ({error}); write the file again")


_VALUES: Mapping[str, Any] = {"resample": 0, "do_rescale": False, "do_normalize": False}
MEDIA: Mapping[str, Medium] = {
    "image": Medium(
        "image_processor",
        "images",
        "image_token",
        ((24, 24), (40, 100)),
        _blank_picture,
        size_of,
        picture,
        (
            (_gray_picture, {**_VALUES, "do_convert_rgb": False}),
            (_blank_picture, _VALUES),
        ),
    ),
    "audio": Medium(
        "feature_extractor",
        "audio",
        "audio_token",
        ((4000, 16000), (9000, 16000)),
        _blank_sound,
        sound_size,
        sound,
    ),
}
"""Name of a kind -> the kind."""
