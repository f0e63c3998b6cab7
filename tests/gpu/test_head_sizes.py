"""Kernels of attention in blocks on a GPU, for heads of any size, beside products in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_lightning.layers.context.blocks import Block
from megatron_lightning.layers.context.kernel_choice import kernel_for
from megatron_lightning.layers.context.kernels import Inputs, Output

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = "cuda:0"
LENGTH = 70
BLOCKS = {
    "causal": Block(slice(0, LENGTH), slice(0, LENGTH), "causal"),
    "none": Block(slice(0, LENGTH), slice(0, LENGTH), "none"),
    "band": Block(slice(0, LENGTH), slice(0, LENGTH), "band", 0, 9),
}
# (backend, block, head size of keys, head size of values)
CASES: list[Any] = [
    (backend, block, *sizes)
    for backend in ("auto", "flash", "efficient")
    for block in BLOCKS
    for sizes in ((64, 64), (12, 12), (24, 16), (20, 12), (192, 128))
    if backend != "flash" or block != "band"
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("backend", "block", "size", "value_size"), CASES)
def test_gradients_are_those_of_products_in_fp32(
    backend: Any, block: str, size: int, value_size: int, dtype: torch.dtype
) -> None:
    draws = torch.Generator().manual_seed(0)

    def drawn(heads: int, channels: int) -> torch.Tensor:
        return torch.randn(2, heads, LENGTH, channels, generator=draws).to(CUDA, dtype)

    inputs = Inputs(drawn(4, size), drawn(2, size), drawn(2, value_size))
    grad, scale = drawn(4, value_size), size**-0.5
    exact = Inputs(*(x.float() for x in inputs))
    device = torch.device(CUDA)
    math, kernel = kernel_for(device, "math"), kernel_for(device, backend)
    expected = math.forward(exact, BLOCKS[block], scale)
    found = kernel.forward(inputs, BLOCKS[block], scale)
    # Half precision: inputs are equal, weights and results are rounded.
    torch.testing.assert_close(found.out.float(), expected.out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found.log_sum.float(), expected.log_sum, rtol=1e-3, atol=1e-3)
    final = Output(found.out, found.log_sum)
    grads = kernel.backward(grad, inputs, final, BLOCKS[block], scale)
    exact_grads = math.backward(grad.float(), exact, expected, BLOCKS[block], scale)
    for own, other, x in zip(grads, exact_grads, inputs, strict=True):
        assert own.shape == x.shape
        # Sums over up to 140 rounded products.
        torch.testing.assert_close(own.float(), other.float(), rtol=5e-2, atol=8e-2)
