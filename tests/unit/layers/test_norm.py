"""RMSNorm of our own against torch's, and what it keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.layers.norm import MixedRMSNorm, RMSNorm, build_norm, rms_norm
from tests.helpers.language_model import small_gpt

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


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_values_and_gradients_are_those_of_the_definition(
    dtype: torch.dtype, scale: float, centered: bool
) -> None:
    x, weight, grad = _values(dtype, scale)
    norm = RMSNorm(24, eps=1e-5, dtype=dtype)
    norm.zero_centered = centered
    norm.weight.data.copy_(weight)
    out = norm(x)
    out.backward(grad)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    expected = F.rms_norm(exact[0], (24,), exact[1] + float(centered), 1e-5)
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


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("wide_stream", [False, True])
def test_a_zero_centered_norm_multiplies_by_one_plus_its_weight(
    kind: Any, wide_stream: bool
) -> None:
    """A weight of 2^-9 beside 1 is lost in bf16: the sum exists in fp32 alone."""
    options: Any = {"normalization": kind, "fp32_residual_connection": wide_stream}
    plain = small_gpt(2, **options)
    norm: Any = build_norm(replace(plain, layernorm_zero_centered_gamma=True), 32)
    same: Any = build_norm(plain, 32)
    assert norm.weight.eq(0.0).all()
    x = torch.randn(5, 32)
    torch.testing.assert_close(norm(x), same(x))
    torch.nn.init.constant_(norm.weight, 2.0**-9)
    torch.nn.init.constant_(same.weight, 1.0 + 2.0**-9)
    torch.testing.assert_close(norm(x), same(x))
    values = x if wide_stream else x.bfloat16()
    half = norm.to(torch.bfloat16)(values)
    assert half.dtype == torch.bfloat16
    torch.nn.init.zeros_(norm.weight)
    assert not torch.equal(half, norm(values))
