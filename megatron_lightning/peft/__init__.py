"""Adapters, trained in place of a model's weights: low-rank matrices (LoRA) or vectors (VeRA)."""

from typing import TYPE_CHECKING

from megatron_lightning._lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lightning.layers.adapters.adapter_layers import adapters_disabled
    from megatron_lightning.peft.merge import merge_adapters
    from megatron_lightning.peft.methods.lora import LoRA
    from megatron_lightning.peft.methods.vera import VeRA
    from megatron_lightning.peft.sources import load_adapters, save_adapters

__all__ = ["LoRA", "VeRA", "adapters_disabled", "load_adapters", "merge_adapters", "save_adapters"]

lazy_attributes(
    __name__,
    {
        "LoRA": "megatron_lightning.peft.methods.lora",
        "VeRA": "megatron_lightning.peft.methods.vera",
        "adapters_disabled": "megatron_lightning.layers.adapters.adapter_layers",
        "load_adapters": "megatron_lightning.peft.sources",
        "merge_adapters": "megatron_lightning.peft.merge",
        "save_adapters": "megatron_lightning.peft.sources",
    },
)
