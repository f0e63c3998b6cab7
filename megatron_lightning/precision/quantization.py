"""Quantize a tensor by a recipe into data and scales.

Shapes: x [..., n].

    scaling           data                      scales
    delayed, current  e4m3 or e5m2 [..., n]     fp32 []
    rowwise           e4m3 [..., n]             fp32 [..., 1]
    blockwise         e4m3 [..., n]             fp32 [..., ceil(n / 128)]
    mxfp8             e4m3 [..., n]             e8m0 [..., ceil(n / 32)]
    nvfp4             uint8 [..., ceil(n / 2)]  e4m3 [..., ceil(n / 16)], and fp32 []

of an input or a gradient. The blocks of a weight [out, in] are 128 x 128 (blockwise) and 16 x 16
(nvfp4), with scales [ceil(out / 128), ceil(in / 128)] and so on. The weights of experts [E, out,
in] are separate tensors, with fp32 scales [E, 1, 1]. With ``delayed`` all experts are a single
tensor. Two nvfp4 values share a byte, the first in the low bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from megatron_lightning.config.value_checks import check_choice, check_kind
from megatron_lightning.errors import ConfigError
from megatron_lightning.precision.formats import pack_e2m1, unpack_e2m1
from megatron_lightning.precision.recipes import BLOCK_SIZES, FP8Recipe, Role
from megatron_lightning.precision.scaling import (
    Block,
    amax_of,
    amax_of_matrices,
    apply_factors,
    from_blocks,
    mx_scales,
    scales_of,
    to_blocks,
    two_level_scales,
    values_of,
)


class TwoLevelScales(NamedTuple):
    """Scales of 4-bit data: a value is code x block scale x tensor scale."""

    blocks: Tensor
    """e4m3, one scale a block."""
    tensor: Tensor
    """fp32, one scale a tensor."""


def block_of(recipe: FP8Recipe, role: Role, *, transposed: bool = False) -> Block:
    """Return the block of matrix values with a common scale.

    Args:
        recipe: The recipe.
        role: Role of the tensor.
        transposed: Whether GEMMs contract the rows of the matrix instead of the columns.
    """
    if recipe.is_per_tensor:
        return Block(None, None)
    size = BLOCK_SIZES.get(recipe.scaling)
    if recipe.is_square(role):
        return Block(size, size)
    return Block(size, 1) if transposed else Block(1, size)


def encode(
    x: Tensor,
    recipe: FP8Recipe,
    role: Role,
    block: Block,
    *,
    shared_amax: Tensor | None = None,
    random: Tensor | None = None,
) -> tuple[Tensor, Tensor | TwoLevelScales]:
    """Return quantized data of the matrices [..., R, C], and scales [..., nR, nC].

    Args:
        x: The matrices.
        recipe: The recipe.
        role: Role of the tensor.
        block: Values with a common scale.
        shared_amax: Amax over the values of a scale beyond the local block, in a shape that expands
            to [..., nR, nC]. With nvfp4 the amax of the tensor, otherwise a replacement of the
            blocks' amax.
        random: See :func:`~megatron_lightning.precision.formats.cast`.
    """
    blocks, name = to_blocks(x, block), recipe.data_format(role)
    # The three families differ in how scales follow from amax values. Data are then the values
    # times a factor, rounded.
    amax = amax_of(blocks)
    scales: Tensor | TwoLevelScales
    if recipe.scaling == "nvfp4":
        shared_amax = amax_of_matrices(x) if shared_amax is None else shared_amax
        factor, inner, outer = two_level_scales(amax, shared_amax)
        scales = TwoLevelScales(inner, outer)
    elif recipe.scaling == "mxfp8":
        factor, scales = mx_scales(amax, name)
    else:
        amax = amax if shared_amax is None else shared_amax.expand(amax.shape)
        factor, scales = scales_of(amax, name, power_of_two=recipe.rounds_scales)
    if random is not None:
        random = to_blocks(random, block)
    return from_blocks(apply_factors(blocks, factor, name, random), *x.shape[-2:]), scales


@torch.no_grad()
def quantize(
    x: Tensor, recipe: FP8Recipe, role: Role = "input"
) -> tuple[Tensor, Tensor | TwoLevelScales]:
    """Return ``(data, scales)`` of ``x`` [..., n], rounded to the nearest, as the table above says.

    Delayed scaling has no history here: the tensor determines its scale. Of the recipe's margin,
    layers and patterns only the margin applies.

    Args:
        x: Floating-point tensor with at least one dim.
        recipe: The recipe.
        role: Whether ``x`` is an input, a weight or an output's gradient.

    Raises:
        ConfigError: If ``x`` is not a floating-point tensor with dims, ``recipe`` is not a recipe,
            or the role is unknown.
    """
    check_kind("recipe", recipe, FP8Recipe)
    check_choice("role", role, get_args(Role))
    if x.ndim == 0 or not x.is_floating_point():
        raise ConfigError(
            f"a tensor of shape {tuple(x.shape)} and dtype {x.dtype} is to be quantized; it must "
            "be a floating tensor with at least one dim."
        )
    matrix = _matrices(x, recipe, role)
    shared_amax = amax_of_matrices(matrix) * 2.0**recipe.margin if recipe.margin else None
    data, scales = encode(matrix, recipe, role, block_of(recipe, role), shared_amax=shared_amax)
    data = data.reshape(x.shape)
    if isinstance(scales, TwoLevelScales):
        blocks = _of_rows(scales.blocks, matrix, x)
        return pack_e2m1(data), TwoLevelScales(blocks, _of_tensor(scales.tensor))
    return data, _of_tensor(scales) if recipe.is_per_tensor else _of_rows(scales, matrix, x)


def _matrices(x: Tensor, recipe: FP8Recipe, role: Role) -> Tensor:
    """Return ``x`` as matrices [..., R, C] for scaling: weights separately, other tensors as
    rows.
    """
    if role == "weight" and x.ndim > 1 and recipe.scaling != "delayed":
        return x
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _of_tensor(scales: Tensor) -> Tensor:
    """Return the scale of one matrix, [1, 1], without dims.

    Scales of several matrices stay unchanged.
    """
    return scales.reshape(()) if scales.ndim == 2 else scales


def _of_rows(scales: Tensor, matrix: Tensor, x: Tensor) -> Tensor:
    """Return scales [m, n] of rows with the leading dims of ``x``.

    Scales of weights stay unchanged.
    """
    return scales if matrix is x else scales.reshape(*x.shape[:-1], scales.shape[-1])


def dequantize(
    data: Tensor,
    scales: Tensor | TwoLevelScales,
    recipe: FP8Recipe,
    role: Role = "input",
    *,
    size: int | None = None,
) -> Tensor:
    """Return the fp32 values of :func:`quantize`'s output.

    Args:
        data: Quantized data.
        scales: Scales of the data.
        recipe: The recipe.
        role: As for :func:`quantize`.
        size: Extent of the last dim (nvfp4 with an odd extent).
    """
    if isinstance(scales, TwoLevelScales):
        data = unpack_e2m1(data, 2 * data.shape[-1] if size is None else size)
        scales = scales.blocks.float() * scales.tensor
    if scales.ndim == 0:
        return data.float() * scales
    matrix = _matrices(data, recipe, role)
    flat = scales if matrix is data else scales.reshape(len(matrix), scales.shape[-1])
    return values_of(matrix, flat, block_of(recipe, role)).reshape(data.shape)
