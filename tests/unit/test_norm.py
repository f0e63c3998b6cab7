"""RMSNorm of our own against torch's, and what it keeps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.layers.norm import MixedRMSNorm, RMSNorm, rms_norm

# Half precision is rounded once; fp32 in another order than torch's.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
}


def _values(dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shape = (33, 3, 24)
    x, grad = torch.randn(shape) * scale, torch.randn(shape)
    return x.to(dtype).requires_grad_(), (torch.rand(24) + 0.5).to(dtype), grad.to(dtype)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_values_and_gradients_are_those_of_the_definition(dtype: torch.dtype, scale: float) -> None:
    x, weight, grad = _values(dtype, scale)
    norm = RMSNorm(24, eps=1e-5, dtype=dtype)
    norm.weight.data.copy_(weight)
    out = norm(x)
    out.backward(grad)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    expected = F.rms_norm(exact[0], (24,), exact[1], 1e-5)
    expected.backward(grad.double())
    assert out.dtype == dtype and x.grad is not None and norm.weight.grad is not None
    for found, right in zip(
        (out, x.grad, norm.weight.grad), (expected, exact[0].grad, exact[1].grad), strict=True
    ):
        largest = right.abs().max()
        torch.testing.assert_close(
            found.double() / largest, right / largest, rtol=0, atol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_keeps_its_input_and_a_number_a_token(
    dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    x, _, _ = _values(dtype)
    norm = RMSNorm(24, eps=1e-5, dtype=weight_dtype)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        norm(x)
    own = [x.numel() * dtype.itemsize, 24 * weight_dtype.itemsize, 33 * 3 * 4]
    assert sorted(kept) == sorted(own)


def test_the_weight_may_have_another_dtype() -> None:
    """Norms of heads have fp32 weights and bf16 inputs under autocast."""
    x, weight, grad = _values(torch.bfloat16)
    own, theirs = (weight.float().requires_grad_() for _ in range(2))
    again = x.detach().requires_grad_()
    out, expected = rms_norm(x, own, 1e-5), F.rms_norm(again, (24,), theirs, 1e-5)
    out.backward(grad)
    expected.backward(grad)
    assert torch.equal(out, expected)
    torch.testing.assert_close(x.grad, again.grad, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(24,), (0, 24), (1, 1, 24)], ids=str)
def test_any_number_of_dims(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).requires_grad_()
    again = x.detach().requires_grad_()
    norm, weight = RMSNorm(24, eps=1e-5), torch.ones(24, requires_grad=True)
    norm(x).square().sum().backward()
    F.rms_norm(again, (24,), weight, 1e-5).square().sum().backward()
    torch.testing.assert_close(x.grad, again.grad, rtol=0, atol=1e-5)
    torch.testing.assert_close(norm.weight.grad, weight.grad, rtol=1e-5, atol=1e-5)


def test_a_stream_in_fp32_is_normalized_in_fp32() -> None:
    x, _, _ = _values(torch.float32)
    norm = MixedRMSNorm(24, eps=1e-5, dtype=torch.bfloat16)
    expected = F.rms_norm(x, (24,), eps=1e-5).to(torch.bfloat16)
    assert torch.equal(norm(x), expected)
