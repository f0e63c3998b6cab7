"""Options of images in conversations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from megatron_lightning.errors import ConfigError

Missing = Literal["refuse", "drop"]


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Images in the conversations of ``FinetuneDataModule``."""

    kind: ClassVar[str] = "image"
    folder: str | None = None
    """Folder of image files. Rows name files inside of it. None: the folder of the rows' file."""
    processor_options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the image processor in place of the folder's, such as ``size`` of Qwen2.5-VL."""
    remote: bool = False
    """Whether images are downloaded from http and https addresses in rows, once, before the run.
    False: an address is an error."""
    missing: Missing = "refuse"
    """Treatment of rows whose image is missing: an error names them (``refuse``), or they are left
    out and counted (``drop``)."""

    def __post_init__(self) -> None:
        if self.missing not in get_args(Missing):
            raise ConfigError(
                f"missing={self.missing!r} of images; must be one of {', '.join(get_args(Missing))}"
            )


@dataclass(frozen=True, kw_only=True)
class AudioOptions(ImageOptions):
    """Sounds in the conversations of ``FinetuneDataModule``: the fields of :class:`ImageOptions`.
    ``processor_options`` are settings of the feature extractor.
    """

    kind: ClassVar[str] = "audio"
