"""The codes with which a training by ``MegatronFP8Precision`` multiplied.

    format        scaling of the recipe   values of a scale
    nvfp4         nvfp4                   16 x 16, written once for each row of 16 values
    fp8_tensor    current                 the matrix
    fp8_channel   rowwise                 a row
    fp8_block     blockwise               128 x 128
    mxfp8         mxfp8                   32 of a row

Scales are the recipe's, which are no powers of two with nvfp4, current and rowwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_lightning.precision.quantization import TwoLevelScales, block_of
from megatron_lightning.precision.quantization import encode as encode_by_recipe
from megatron_lightning.precision.recipes import FP8Recipe, Scaling
from megatron_lightning.precision.served.values import Encoded, ServedFormat, ServedName

SCALINGS: Mapping[ServedName, Scaling] = MappingProxyType(
    {
        "nvfp4": "nvfp4", "fp8_tensor": "current", "fp8_channel": "rowwise",
        "fp8_block": "blockwise", "mxfp8": "mxfp8",
    }
)  # fmt: skip
"""Format -> scaling of the recipe with the same codes."""


FORMATS: Mapping[Scaling, ServedName] = MappingProxyType({x: name for name, x in SCALINGS.items()})
"""Scaling of a recipe -> format with the same codes."""


def default_recipe(form: ServedFormat) -> FP8Recipe:
    """Return the recipe with the codes of a format of ``SCALINGS``."""
    return FP8Recipe(scaling=SCALINGS[form.name])


def rows_of_block(recipe: FP8Recipe) -> int:
    """Return the rows with a common scale. 1: a row, or all rows of the matrix."""
    return block_of(recipe, "weight").rows or 1


@torch.no_grad()
def trained_codes(weight: Tensor, recipe: FP8Recipe, amax: Tensor | None) -> Encoded:
    """Return the codes and scales of a weight [R, C] by the recipe.

    Args:
        weight: The weight in any dtype. The training quantized bf16.
        recipe: The recipe.
        amax: Amax [1, 1] of the matrix that the training quantized. None: scales are of blocks.
    """
    shared = None if amax is None else amax.bfloat16().float()
    block = block_of(recipe, "weight")
    codes, scales = encode_by_recipe(
        weight.bfloat16(), recipe, "weight", block, shared_amax=shared
    )  # fmt: skip
    if not isinstance(scales, TwoLevelScales):
        return Encoded(codes.float(), scales.float(), None)
    rows = scales.blocks.float().repeat_interleave(block.rows or 1, -2)
    return Encoded(codes.float(), rows[..., : weight.shape[-2], :], scales.tensor)
