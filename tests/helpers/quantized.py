"""Count the products of quantized layers, and round their values at random."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron_lightning.layers.linear.gemm import Gemm, Operand
from megatron_lightning.precision.emulation import EmulatedGemm
from megatron_lightning.precision.formats import FORMAT_MAX, cast, power_of_two_below

CODES = 255
"""Different values of 8 bits with one scale."""
_MANTISSAS = {"e4m3": (3, 2.0**-6), "e5m2": (2, 2.0**-14), "e2m1": (1, 1.0)}
"""Bits of a format's mantissa, and its least normal value."""


@contextmanager
def counted_products(num_scales: int = 1) -> Iterator[dict[str, int]]:
    """Count products, and those whose operands both have few different values.

    Args:
        num_scales: Scales of a tensor.
    """
    counts = {"products": 0, "quantized": 0}

    def count(original: Any) -> Any:
        def counting(gemm: Gemm, left: Operand, right: Operand, *rest: Any) -> Tensor:
            if isinstance(gemm, EmulatedGemm):
                counts["products"] += 1
                few = CODES * num_scales
                counts["quantized"] += all(len(x.data.unique()) <= few for x in (left, right))
            result: Tensor = original(gemm, left, right, *rest)
            return result

        return counting

    names = "forward", "input_grad", "weight_grad"
    with patch.multiple(Gemm, **{name: count(getattr(Gemm, name)) for name in names}):
        yield counts


@contextmanager
def dithered_casts(seed: int) -> Iterator[None]:
    """Inside the block values are rounded at random to one of the two codes around them, without
    bias.

    Trainings with several seeds differ as valid ones do whose values are rounded independently:
    with a step d between codes, rounding to the nearest errs by d^2 / 12, two such roundings differ
    by twice that on average, and rounding at random errs by d^2 / 6.
    """
    generator = torch.Generator().manual_seed(seed)

    def dithered(x: Tensor, name: str, random: Tensor | None = None) -> Tensor:
        bits, least = _MANTISSAS[name]
        x = x.clamp(-FORMAT_MAX[name], FORMAT_MAX[name])
        step = power_of_two_below(x).clamp(min=least) * 2.0**-bits
        steps = (x.abs() / step + torch.rand(x.shape, generator=generator)).floor()
        return cast((steps * step).copysign(x), name)

    with ExitStack() as stack:
        for module in ("scaling", "emulation"):
            stack.enter_context(patch(f"megatron_lightning.precision.{module}.cast", dithered))
        yield
