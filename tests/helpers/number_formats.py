"""Formats of 8 and 4 bits and the recipes' scales, written from their definitions in numpy: what
:mod:`megatron_lightning.precision` is compared with.

Every code is decoded from its bits; a value is rounded by a search among the decoded ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]


@dataclass(frozen=True)
class NumberFormat:
    """A format with a sign; codes with the sign bit cleared count up with the values."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: int
    """How many of the largest codes are infinity or NaN."""

    @property
    def sign(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    def value(self, code: int) -> float:
        """Decode one code, sign included; specials are NaN."""
        sign, size = (-1.0 if code & self.sign else 1.0), code & (self.sign - 1)
        if size >= self.sign - self.specials:
            return math.nan
        exponent, mantissa = divmod(size, 1 << self.mantissa_bits)
        fraction = mantissa / (1 << self.mantissa_bits)
        if exponent == 0:
            return sign * math.ldexp(fraction, 1 - self.bias)
        return sign * math.ldexp(1.0 + fraction, exponent - self.bias)

    @property
    def values(self) -> NDArray[np.float64]:
        """Values of the finite codes >= 0, in order."""
        return np.array([self.value(code) for code in range(self.sign - self.specials)])

    def encode(self, x: Floats) -> Codes:
        """Round to the nearest code, ties to the even one, saturating. NaN is the largest code."""
        values, exact = self.values, np.abs(x.astype(np.float64))
        above = np.clip(np.searchsorted(values, exact), 0, len(values) - 1)
        below = np.maximum(above - 1, 0)
        up, down = values[above] - exact, exact - values[below]
        nearest = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
        nearest = np.where(exact >= values[-1], len(values) - 1, nearest)
        nearest = np.where(np.isnan(exact), self.sign - 1, nearest)
        return (nearest + np.where(np.signbit(x), self.sign, 0)).astype(np.uint8)


E4M3 = NumberFormat(4, 3, 7, 1)
E5M2 = NumberFormat(5, 2, 15, 4)
E2M1 = NumberFormat(2, 1, 1, 0)


def e8m0_up(x: Floats) -> Codes:
    """Return the code of the smallest power of two >= x, from 2^-127 (0) to 2^127 (254)."""
    powers = np.exp2(np.arange(-127, 128, dtype=np.float64))
    codes = np.minimum(np.searchsorted(powers, x.astype(np.float64)), 254)
    return np.where(np.isnan(x), 255, codes).astype(np.uint8)


def blocks_of(x: Floats, rows: int, columns: int) -> list[tuple[slice, slice]]:
    """Return the blocks of a matrix, row by row; the last ones may be smaller."""
    return [
        (slice(r, r + rows), slice(c, c + columns))
        for r in range(0, x.shape[0], rows)
        for c in range(0, x.shape[1], columns)
    ]


def fp32_scales(amax: np.float32, largest: float, power_of_two: bool) -> tuple[Floats, Floats]:
    """Return factor and scale of a block, each operation rounded to fp32."""
    one = np.float32(1.0)
    if not np.isfinite(amax):
        return one, np.float32(np.nan)
    if amax == 0.0:
        return one, one
    with np.errstate(over="ignore"):
        factor = min(np.float32(largest) / amax, np.finfo(np.float32).max)
    if power_of_two:
        factor = np.float32(math.ldexp(1.0, math.frexp(factor)[1] - 1))
    return factor, one / factor


def quantize_matrix(
    x: Floats, scaling: str, data_format: NumberFormat, block: tuple[int, int], power_of_two: bool
) -> tuple[Codes, NDArray[np.generic], np.float32]:
    """Return codes, scales of blocks and scale of the tensor of a matrix."""
    rows, columns = block
    shape = (-(-x.shape[0] // rows), -(-x.shape[1] // columns))
    codes, scales = np.zeros(x.shape, np.uint8), []
    largest = data_format.values[-1]
    tensor_scale, encode = np.float32(1.0), np.float32(1.0)
    if scaling == "nvfp4":
        encode, tensor_scale = fp32_scales(np.abs(x).max(), 448.0 * 6.0, False)
        decode = np.float32(1.0) / encode
    for place in blocks_of(x, rows, columns):
        amax = np.abs(x[place]).max()
        scale: np.generic
        if scaling == "mxfp8":
            scale = e8m0_up((amax * np.float32(1.0 / 448.0))[None])[0]
            factor = np.float32(np.nan if scale == 255 else math.ldexp(1.0, 127 - int(scale)))
        elif scaling == "nvfp4":
            scale = E4M3.encode((amax * (encode * (np.float32(1.0) / np.float32(6.0))))[None])[0]
            with np.errstate(divide="ignore", over="ignore"):
                factor = np.float32(1.0) / (np.float32(E4M3.value(int(scale))) * decode)
            factor = np.minimum(factor, np.finfo(np.float32).max)
        else:
            factor, scale = fp32_scales(amax, largest, power_of_two)
        with np.errstate(invalid="ignore", over="ignore"):
            codes[place] = data_format.encode(x[place] * factor)
        scales.append(scale)
    return codes, np.array(scales).reshape(shape), tensor_scale
