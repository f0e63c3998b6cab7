"""Adapters: low-rank matrices that are trained in the place of a model's weights (LoRA)."""

from megatron_lightning.layers.adapters import adapters_disabled
from megatron_lightning.peft.lora import LoRA

__all__ = ["LoRA", "adapters_disabled"]
