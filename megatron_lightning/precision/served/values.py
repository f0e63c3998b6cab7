"""Weights in the formats that servers load: codes, scales, and the value of a code.

Exported folders take their numbers from here alone. ``R x C`` is a weight [out, in], also stacked.

    format        values of a scale   code   scale                  outer scale
    nvfp4         16 of a row         e2m1   e4m3                   of the fused matrix, 2^k
    mxfp4         32 of a row         e2m1   e8m0                   -
    mxfp8         32 of a row         e4m3   e8m0                   -
    fp8_tensor    the fused matrix    e4m3   fp32, a power of two   -
    fp8_channel   a row               e4m3   fp32, a power of two   -
    fp8_block     128 x 128           e4m3   fp32, a power of two   -
    int8          a row               int8   bf16, a power of two   -
    int4          128 of a row        int4   bf16 of 5 bits         -

Floating scales are powers of two, but for the e4m3 scales of nvfp4, and a scale of int4 has 5
significant bits. A code times its scales is therefore *exact in bf16*: the same whether a server
multiplies by a scale or divides by its reciprocal, in which order, and in which dtype.

Servers multiply q, k and v as one matrix, and gate and up, with one outer scale for the fused
matrix. Their amax is therefore shared *before* rounding (:func:`fused_with`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.precision.formats import FORMAT_MAX, cast, power_of_two_below, rounded
from megatron_lightning.precision.scaling import (
    Block,
    amax_of,
    amax_of_matrices,
    from_blocks,
    mx_scales,
    scales_of,
    to_blocks,
    values_of,
)

Fit = Literal["max", "mse", "4over6", "gptq", "trained"]
"""How a scale is chosen.

    max      the largest value is the largest code
    mse      the smallest squared error of a few fractions of that scale
    4over6   nvfp4: the largest of 16 values is code 6 or 4, by the smaller squared error
             (https://arxiv.org/abs/2512.02010)
    gptq     int4: max, with each column's error made up for by later columns, see ``gptq.py``
    trained  by the recipe of MegatronFP8Precision, see ``trained_codes.py``
"""
ServedName = Literal[
    "nvfp4", "mxfp4", "mxfp8", "fp8_tensor", "fp8_channel", "fp8_block", "int8", "int4"
]
NAMES: tuple[ServedName, ...] = get_args(ServedName)
_SIZES: Mapping[ServedName, int] = MappingProxyType(
    {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32, "fp8_block": 128, "int4": 128}
)
LARGEST_INTEGER: Mapping[str, float] = MappingProxyType({"int8": 127.0, "int4": 7.0})
"""Format -> largest code, of which scales are made."""
_SCALE_BITS: Mapping[str, int] = MappingProxyType(
    {"int8": 1, "int4": 5}
)  # 8 bits of bf16 less those of a code
_GROUPS_OF_INT4 = (128, 64, 32)
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
_LARGEST_FACTOR = 1.5  # 6 / 4
_SMALLEST_E4M3 = 2.0**-9
_FP32_MAX = torch.finfo(torch.float32).max


class ServedFormat(NamedTuple):
    """A format of weights. See the table of the module."""

    name: ServedName
    group_size: int | None = None
    """Values of a scale along a row. None: a full row."""

    @classmethod
    def of(cls, name: str, group_size: int | None = None) -> ServedFormat:
        """Return the format of a name.

        Args:
            name: One of ``NAMES``.
            group_size: Values of a scale (int4). None: the format's own number.

        Raises:
            ConfigError: If the name is unknown, or the format has no such groups.
        """
        known = next((known for known in NAMES if known == name), None)
        if known is None:
            raise ConfigError(
                f"weights are to be in {name!r}, which is no format of servers here. Set one of "
                f"{', '.join(NAMES)}."
            )
        own = _SIZES.get(known)
        if group_size is None or group_size == own:
            return cls(known, own)
        if known != "int4" or group_size not in _GROUPS_OF_INT4:
            sizes = f"group_size {', '.join(map(str, _GROUPS_OF_INT4))} with int4"
            raise ConfigError(
                f"group_size is {group_size!r} with {known}. Remove it, or set {sizes}."
            )
        return cls(known, group_size)

    @property
    def block(self) -> Block:
        """Extent of the values with a common scale."""
        if self.name == "fp8_tensor":
            return Block(None, None)
        return Block(self.group_size if self.name == "fp8_block" else 1, self.group_size)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.name in ("nvfp4", "mxfp4", "int4") else 8

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers."""
        return self.name in LARGEST_INTEGER

    @property
    def is_of_matrix(self) -> bool:
        """Whether a scale is of the fused matrix."""
        return self.name in ("nvfp4", "fp8_tensor")

    def shared_amax(self, weight: Tensor) -> Tensor | None:
        """Return the amax of a matrix [..., 1, 1] or of rows [..., R, 1], which a part of the
        matrix does not know. None: every scale is of a block.
        """
        if self.is_of_matrix:
            return amax_of_matrices(weight)
        if self.block.columns is None:
            return weight.abs().amax(-1, keepdim=True).float()
        return None

    def factors(self, fit: Fit) -> tuple[float, ...]:
        """Return the factors of an amax that are tried for every scale."""
        if fit == "4over6":
            return (1.0, _LARGEST_FACTOR)
        if fit != "mse" or self.name == "fp8_tensor":  # fused matrices share one scale
            return (1.0,)
        if self.name in ("int4", "nvfp4"):
            return tuple(1.0 - step / 20 for step in range(11))
        return (1.0, 2.0, 0.5)  # scales are powers of two

    def misfit(self, columns: int) -> str | None:
        """Return why rows of ``columns`` values do not fit, and what does. None: they fit."""
        size = self.group_size
        if size is None or self.name == "fp8_block" or columns % size == 0:
            return None
        fitting = [other for other in _GROUPS_OF_INT4 if columns % other == 0]
        way = "fp8_channel or int8, which have one scale a row"
        if self.name == "int4" and fitting:
            way = f"group_size {fitting[0]}"
        return (
            f"rows of {columns:,} values are no multiple of {size}, the values of a scale of "
            f"{self.name}. Set {way}"
        )


class Encoded(NamedTuple):
    """A weight in few bits."""

    codes: Tensor
    """Codes [..., R, C] as fp32 numbers."""
    scales: Tensor
    """fp32, [..., ceil(R / r), ceil(C / c)]."""
    outer: Tensor | None
    """The outer scale [..., 1, 1] in fp32, a power of two."""

    def values(self, form: ServedFormat) -> Tensor:
        """Return the values [..., R, C] in fp32, exact in bf16."""
        scales = self.scales if self.outer is None else self.scales * self.outer
        return values_of(self.codes, scales, form.block)


def fused_with(name: str) -> tuple[str, ...]:
    """Return the names of the layers that servers multiply as one matrix with the layer ``name``,
    itself included.
    """
    return next((names for names in _FUSED if name in names), (name,))


def fused_paths(path: str) -> tuple[str, ...]:
    """Return the paths of the layers that servers multiply as one matrix with the layer at
    ``path``, itself included.
    """
    parent, dot, name = path.rpartition(".")
    return tuple(f"{parent}{dot}{other}" for other in fused_with(name))


@torch.no_grad()
def encode(
    weight: Tensor, form: ServedFormat, amax: Tensor | None = None, *, fit: Fit = "max"
) -> Encoded:
    """Round a weight [..., R, C] to the nearest codes.

    Args:
        weight: The weight, in the dtype of the GEMM.
        form: The format.
        amax: :meth:`ServedFormat.shared_amax`, of all fused matrices and ranks. None: the weight is
            full and alone.
        fit: How scales are chosen.
    """
    weight = weight.float()
    blocks = to_blocks(weight, form.block)
    amax = form.shared_amax(weight) if amax is None else amax
    own, outer = amax_of(blocks), None
    if amax is not None and form.name == "nvfp4":
        outer = outer_scale(amax, _LARGEST_FACTOR if fit == "4over6" else 1.0)
    elif amax is not None:
        own = amax.expand(own.shape)
    first, *others = form.factors(fit)
    codes, scales = _round(blocks, form, own * first, outer)
    if others:
        least = _error(blocks, codes, scales, outer)
    for factor in others:
        new_codes, new_scales = _round(blocks, form, own * factor, outer)
        error = _error(blocks, new_codes, new_scales, outer)
        is_better = error < least
        codes = torch.where(is_better[..., :, None, :, None], new_codes, codes)
        scales, least = scales.where(~is_better, new_scales), torch.minimum(error, least)
    return Encoded(from_blocks(codes, *weight.shape[-2:]), scales, outer)


def _round(
    blocks: Tensor, form: ServedFormat, amax: Tensor, outer: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return codes [..., nR, r, nC, c] and scales [..., nR, nC] of blocks, both in fp32."""
    if form.is_integer:
        largest = LARGEST_INTEGER[form.name]
        scales = _rounded_up(amax / largest, _SCALE_BITS[form.name])
        scales = scales.where(scales != 0, 1.0)
        codes = blocks / scales.unsqueeze(-2).unsqueeze(-1)
        return codes.round().clamp(-largest - 1, largest), scales
    if outer is not None:
        largest = FORMAT_MAX["e2m1"]
        scales = cast(amax / largest / outer, "e4m3").float().clamp(min=_SMALLEST_E4M3)
        factor = (scales * outer).reciprocal().clamp(max=_FP32_MAX)
    elif form.name == "mxfp4":
        scales = _mxfp4_scales(amax)
        factor = scales.reciprocal()
    elif form.name == "mxfp8":
        factor, exponents = mx_scales(amax, "e4m3")
        scales = exponents.float()
    else:
        factor, scales = scales_of(amax, "e4m3", power_of_two=True)
    code = "e2m1" if form.name in ("nvfp4", "mxfp4") else "e4m3"
    return rounded(blocks * factor.unsqueeze(-2).unsqueeze(-1), code), scales


def _error(blocks: Tensor, codes: Tensor, scales: Tensor, outer: Tensor | None) -> Tensor:
    """Return the squared error of every block."""
    scales = scales if outer is None else scales * outer
    difference = codes * scales.unsqueeze(-2).unsqueeze(-1) - blocks
    return difference.square().sum((-3, -1))


def outer_scale(amax: Tensor, room: float = 1.0) -> Tensor:
    """Return 2^k of a matrix, with which ``room`` times the scale of no block exceeds the largest
    e4m3.
    """
    largest = FORMAT_MAX["e4m3"] * FORMAT_MAX["e2m1"] / room
    factor = power_of_two_below((torch.full_like(amax, largest) / amax).clamp(max=_FP32_MAX))
    outer = factor.where(amax > 0.0, 1.0).reciprocal()
    return outer.where(amax.isfinite(), torch.nan)


def _rounded_up(x: Tensor, bits: int) -> Tensor:
    """Round values >= 0 up to some significant bits."""
    below = (1 << (24 - bits)) - 1
    return ((x.contiguous().view(torch.int32) + below) & ~below).view(torch.float32)


def _mxfp4_scales(amax: Tensor) -> Tensor:
    """Return powers of two by the rule of compressed-tensors: an amax below 1.75 * 2^k gives
    2^(k - 2), which saturates values above 1.5 * 2^k and errs less than the next power.
    """
    rounded = (amax.contiguous().view(torch.int32) + 0x200000).view(torch.float32)
    scales = power_of_two_below(rounded) / 4
    return scales.clamp(2.0**-126, 2.0**127).where(amax.isfinite(), torch.nan)
