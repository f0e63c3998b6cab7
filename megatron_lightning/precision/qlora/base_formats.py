"""Formats of a frozen base in few bits. No torch here."""

from __future__ import annotations

from typing import Literal, get_args

from megatron_lightning.config.left_out import LEFT_OUT
from megatron_lightning.errors import ConfigError

BaseFormat = Literal["blockwise", "mxfp8", "nvfp4"]


def check_format(name: str | None) -> None:
    """Check the name of a format.

    Raises:
        ConfigError: If there is no such format.
    """
    if name is None or name in get_args(BaseFormat):
        return
    if reason := LEFT_OUT.get(("base", name)):
        raise ConfigError(f"base of LoRA is {name!r}. {reason}")
    raise ConfigError(
        f"base of LoRA is {name!r}, which is unknown. Set nvfp4 (4.5 bits a weight), mxfp8 (8.25 "
        "bits) or blockwise (8.25 bits), or None for the model's own values."
    )
