"""Count the products of quantized layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from megatron_lightning.layers.gemm import Gemm, Operand
from megatron_lightning.precision.emulation import EmulatedGemm

CODES = 255
"""Different values of 8 bits with one scale."""


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
