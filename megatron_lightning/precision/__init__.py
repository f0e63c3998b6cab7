"""Layers with GEMMs over 8-bit or 4-bit numbers: recipes, formats, and a backend for any device."""

from typing import TYPE_CHECKING

from megatron_lightning._lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lightning.precision.quantization import dequantize, quantize
    from megatron_lightning.precision.recipes import FP8Recipe
    from megatron_lightning.precision.served.qat import QAT

__all__ = ["QAT", "FP8Recipe", "dequantize", "quantize"]

lazy_attributes(
    __name__,
    {
        "QAT": "megatron_lightning.precision.served.qat",
        "FP8Recipe": "megatron_lightning.precision.recipes",
        "dequantize": "megatron_lightning.precision.quantization",
        "quantize": "megatron_lightning.precision.quantization",
    },
)
