"""Scales of matrix blocks, and the quantized data of each scale.

Notation: ``R x C`` a matrix, [..., R, C] for stacked matrices, ``r x c`` a block of the matrix, so
that scales are [..., ceil(R / r), ceil(C / c)]. The last blocks may be ragged. Zeros pad ragged
blocks, and zeros change no amax. A block over a full dim exists even if the dim has length 0.

With ``amax`` the largest absolute value of a block and ``M`` the largest value of the format,

    factor = M / amax         data = cast(x * factor)          scale = 1 / factor

A block of zeros has the factor 1. A block with an infinity or NaN has a scale that makes its values
NaN (or, for e8m0, so large that they overflow), so that an overflow shows in the GEMM's result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.precision.formats import (
    FORMAT_MAX,
    cast,
    power_of_two_below,
    to_e8m0,
)

_FP32_MAX = torch.finfo(torch.float32).max
_SCALE_MAX = FORMAT_MAX["e4m3"]  # of the scales of 4-bit blocks


class Block(NamedTuple):
    """Extent of the values with a common scale. None: the full dim."""

    rows: int | None
    columns: int | None


def to_blocks(x: Tensor, block: Block) -> Tensor:
    """Return [..., R, C] as fp32 [..., ceil(R / r), r, ceil(C / c), c], padded with zeros."""
    num_rows, num_columns = x.shape[-2:]
    rows, below = _count_blocks(num_rows, block.rows)
    columns, beside = _count_blocks(num_columns, block.columns)
    x = x.float()
    if beside or below:
        x = F.pad(x, (0, beside, 0, below))
    *stacked, height, width = x.shape
    return x.reshape(*stacked, height // rows, rows, width // columns, columns)


def _count_blocks(extent: int, size: int | None) -> tuple[int, int]:
    """Return the extent of blocks in a dim, and the padding that completes the last block."""
    if size is None:
        size = max(1, extent)
        return size, size - extent
    return size, -extent % size


def from_blocks(blocks: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """Undo :func:`to_blocks`."""
    return blocks.flatten(-2).flatten(-3, -2)[..., :num_rows, :num_columns]


def amax_of(blocks: Tensor) -> Tensor:
    """Return the largest absolute value of each block [..., ceil(R / r), ceil(C / c)]."""
    return blocks.abs().amax(dim=(-3, -1))


def amax_of_matrices(x: Tensor) -> Tensor:
    """Return the amax of each matrix [..., 1, 1] in fp32. 0 for an empty matrix."""
    if not x.numel():
        return x.new_zeros((*x.shape[:-2], 1, 1), dtype=torch.float32)
    return x.abs().amax(dim=(-2, -1), keepdim=True).float()


def _quotient(number: float, x: Tensor) -> Tensor:
    """Return number / x, rounded once: Python's operator multiplies by the rounded reciprocal."""
    return torch.full_like(x, number) / x


def factors(amax: Tensor, name: str, *, power_of_two: bool) -> Tensor:
    """Return the factors applied before the cast to a format, in fp32."""
    factor = _quotient(FORMAT_MAX[name], amax).clamp(max=_FP32_MAX)
    if power_of_two:
        factor = power_of_two_below(factor)
    return factor.where((amax > 0.0) & amax.isfinite(), 1.0)


def scales_of(amax: Tensor, name: str, *, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Return factors and scales for the given amax values, in fp32."""
    factor = factors(amax, name, power_of_two=power_of_two)
    return factor, factor.reciprocal().where(amax.isfinite(), torch.nan)


def mx_scales(amax: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return factors in fp32 and scales in e8m0."""
    # A product with the rounded reciprocal, as in Transformer Engine.
    scales = to_e8m0(amax * torch.tensor(1.0 / FORMAT_MAX[name], dtype=torch.float32))
    return scales.float().reciprocal(), scales  # exact


def two_level_scales(amax: Tensor, tensor_amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the factors of blocks, their e4m3 scales, and the fp32 scale of the tensor.

    A block's value is code x e4m3 scale x tensor scale. The largest block has an e4m3 scale of 448.
    The order of the operations is Transformer Engine's.
    """
    encode = _quotient(_SCALE_MAX * FORMAT_MAX["e2m1"], tensor_amax).clamp(max=_FP32_MAX)
    encode = encode.where((tensor_amax > 0.0) & tensor_amax.isfinite(), 1.0)
    decode = encode.reciprocal()
    sixth = torch.tensor(FORMAT_MAX["e2m1"], device=amax.device).reciprocal()
    block = cast((amax * (encode * sixth)).clamp(max=_FP32_MAX), "e4m3")
    factor = (block.float() * decode).reciprocal().clamp(max=_FP32_MAX)
    return factor, block, decode.where(tensor_amax.isfinite(), torch.nan)


def apply_factors(
    blocks: Tensor, factor: Tensor, name: str, random: Tensor | None = None
) -> Tensor:
    """Return the quantized data of blocks [..., nR, r, nC, c] with factors [..., nR, nC]."""
    return cast(blocks * factor.unsqueeze(-2).unsqueeze(-1), name, random)


def values_of(data: Tensor, scales: Tensor, block: Block) -> Tensor:
    """Return the fp32 values [..., R, C] of quantized data [..., R, C] with scales [..., nR,
    nC].
    """
    blocks = to_blocks(data, block) * scales.float().unsqueeze(-2).unsqueeze(-1)
    return from_blocks(blocks, *data.shape[-2:])
