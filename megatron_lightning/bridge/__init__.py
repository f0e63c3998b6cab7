"""From Hugging Face folders and back: their tensors as sources of parameters, read box by box."""

from typing import TYPE_CHECKING

from megatron_lightning._lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lightning.bridge.auto import AutoBridge

__all__ = ["AutoBridge"]

lazy_attributes(__name__, {"AutoBridge": "megatron_lightning.bridge.auto"})
