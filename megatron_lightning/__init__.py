"""Megatron-style parallel training for PyTorch Lightning.

The names below are imported on first use, so that importing the package imports neither torch nor
Lightning.
"""

from typing import TYPE_CHECKING

from megatron_lightning._lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lightning.bridge import AutoBridge
    from megatron_lightning.models import GPTModel
    from megatron_lightning.peft import LoRA
    from megatron_lightning.strategies import MegatronStrategy

__version__ = "0.1.0"
__all__ = ["AutoBridge", "GPTModel", "LoRA", "MegatronStrategy"]

lazy_attributes(
    __name__,
    {
        "AutoBridge": "megatron_lightning.bridge",
        "GPTModel": "megatron_lightning.models",
        "LoRA": "megatron_lightning.peft",
        "MegatronStrategy": "megatron_lightning.strategies",
    },
)
