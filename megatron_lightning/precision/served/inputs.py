"""Inputs of layers as servers round them: by scales found at run time, or fixed before.

format        values of a scale   code   scale
mxfp4         32                  e2m1   power of two
mxfp8         32                  e4m3   power of two
fp8_channel   a token             e4m3   amax / 448, fp32
fp8_block     128                 e4m3   amax / 448, fp32
int8          a token             int8   amax / 127, fp32
nvfp4         16                  e2m1   e4m3, and 2^k of the tensor, fixed
fp8_tensor    the tensor          e4m3   2^k, fixed
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_lightning.precision.formats import rounded
from megatron_lightning.precision.scaling import (
    Block,
    amax_of,
    from_blocks,
    scales_of,
    to_blocks,
    values_of,
)
from megatron_lightning.precision.served.values import ServedFormat, encode

InputName = Literal["mxfp4", "mxfp8", "fp8_channel", "fp8_block", "int8", "nvfp4", "fp8_tensor"]
INPUT_NAMES: tuple[InputName, ...] = get_args(InputName)
_LARGEST_INT8 = 127.0


def is_of_token(form: ServedFormat) -> bool:
    """Return whether a scale is of all features of a token, which ranks may divide."""
    return form.block.columns is None and not form.is_of_matrix


@torch.no_grad()
def rounded_inputs(x: Tensor, form: ServedFormat, amax: Tensor | None = None) -> Tensor:
    """Return inputs [..., features] rounded as servers do, in their dtype.

    Args:
        x: The inputs.
        form: The format, of ``INPUT_NAMES``.
        amax: Amax of each token [..., 1], over ranks that divide the features. None: as ``x``. With
            ``nvfp4`` and ``fp8_tensor``: the fixed amax [1, 1] of the layer, beyond which values
            saturate.
    """
    rows = x.reshape(-1, x.shape[-1]).float()
    if form.is_of_matrix or form.name in ("mxfp4", "mxfp8"):
        return encode(rows, form, amax).values(form).to(x.dtype).reshape(x.shape)
    block = Block(1, form.group_size)
    blocks = to_blocks(rows, block)
    own = amax_of(blocks) if amax is None else amax.reshape(-1, 1).float()
    if form.name == "int8":
        scales = (own / _LARGEST_INT8).where(own > 0.0, 1.0)
        codes = (blocks / scales[:, None, :, None]).round().clamp(-_LARGEST_INT8, _LARGEST_INT8)
    else:
        factor, scales = scales_of(own, "e4m3", power_of_two=False)
        codes = rounded(blocks * factor[:, None, :, None], "e4m3")
    values = values_of(from_blocks(codes, *rows.shape), scales, block)
    return values.to(x.dtype).reshape(x.shape)
