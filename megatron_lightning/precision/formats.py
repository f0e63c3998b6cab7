"""Number formats of 8 and 4 bits, and casts to the formats.

    format   sign exponent mantissa   largest    smallest   beyond the largest
    e4m3       1     4        3       448        2^-9       NaN, no infinity
    e5m2       1     5        2       57,344     2^-16      infinity, NaN
    e2m1       1     2        1       6          0.5        neither
    e8m0       0     8        0       2^127      2^-127     NaN; scales only

Casts round to the nearest value, ties to even, and *saturate*: values and infinities beyond the
largest value become the largest value, on every version of torch (casts before torch 2.13 gave
NaN). NaN stays NaN. e2m1 has no NaN, so a recipe marks a block with a NaN or an infinity by the
block's scale.

torch has no casts to e2m1. Values representable in e2m1 are stored as e4m3, because e4m3 represents
every e2m1 value. :func:`pack_e2m1` packs two values into a byte.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

DTYPES: Mapping[str, torch.dtype] = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e2m1": torch.float8_e4m3fn,
}
"""Storage dtype of a format's values."""
FORMAT_MAX: Mapping[str, float] = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
"""Largest value of a format."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7. Bit 3 is the sign."""
_EXPONENT_BITS = 0xFF


def cast(x: Tensor, name: str, random: Tensor | None = None) -> Tensor:
    """Round fp32 values to a format, saturating.

    Args:
        x: Values, in fp32.
        name: The format.
        random: Uniform in [0, 1), of the shape of ``x``: round up with the probability that keeps
            the mean (e2m1 only).
    """
    largest = FORMAT_MAX[name]
    x = x.clamp(-largest, largest)
    return (_round_e2m1(x, random) if name == "e2m1" else x).to(DTYPES[name])


def rounded(x: Tensor, name: str) -> Tensor:
    """Round fp32 values to e4m3 or e2m1 as :func:`cast` does, in fp32. On a CPU, in a third of the
    time of a cast to 8 bits and back.
    """
    largest = FORMAT_MAX[name]
    x = x.clamp(-largest, largest)
    if name == "e2m1":
        return _round_e2m1(x, None)
    # Below 2^-6 values are 2^-9 apart, above an eighth of the power of two below.
    step = power_of_two_below(x).clamp_(min=2.0**-6).mul_(0.125)
    return (x / step).round_().mul_(step)


def _round_e2m1(x: Tensor, random: Tensor | None) -> Tensor:
    """Round values within [-6, 6].

    Representable values are 0.5 apart below 2, 1 below 4, and 2 above.
    """
    step = power_of_two_below(x).clamp_(1.0, 4.0).mul_(0.5)
    # A value is an even multiple of the step if its code is even, so ties go to even codes.
    steps = x / step
    if random is None:
        return steps.round_().mul_(step)
    # The sum may be rounded up to the next step, beyond 6.
    return steps.add_(random).floor_().mul_(step).clamp_(-6.0, 6.0)


def to_e8m0(x: Tensor) -> Tensor:
    """Round fp32 values >= 0 up to powers of two, as Transformer Engine's ``float_to_e8m0`` does
    (torch's cast rounds to the nearest): infinity becomes 2^127, NaN stays.
    """
    bits = x.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Below 2^-126 numbers are subnormal: up to 2^-127 the first code serves, then the second.
    up = (mantissa > torch.where(exponent == 0, 0x400000, 0)) & (exponent < 0xFE)
    codes = (exponent + up).clamp(max=0xFE).masked_fill(x.isnan(), _EXPONENT_BITS)
    return codes.to(torch.uint8).view(torch.float8_e8m0fnu)


def power_of_two_below(x: Tensor) -> Tensor:
    """Return the power of two at or below the absolute value, of normal fp32 values."""
    return (x.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)


def pack_e2m1(x: Tensor) -> Tensor:
    """Return the codes of e2m1 values [..., n] as uint8 [..., ceil(n / 2)], the first of two in the
    low bits. Kernels take ``.view(torch.float4_e2m1fn_x2)``.
    """
    x = x.float()
    values = torch.tensor(E2M1_VALUES, device=x.device)
    codes = torch.bucketize(x.abs(), values) | (x.signbit().long() << 3)
    if x.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def unpack_e2m1(packed: Tensor, size: int) -> Tensor:
    """Return fp32 values [..., size] of packed codes."""
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)[..., :size].long()
    values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=packed.device)
    return values[codes]
