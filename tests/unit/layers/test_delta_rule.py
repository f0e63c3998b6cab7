"""The gated delta rule in chunks, against the recurrence and against ``transformers``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.layers.state_space.delta_rule import delta_rule
from tests.helpers.versions import since

LENGTHS = [(37, 16), (64, 64), (5, 64), (48, 8)]


def _inputs(length: int, *, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(normal(length, 2, 2, 6), dim=-1) for _ in range(2))
    v, decay = normal(length, 2, 4, 5), -2.0 * normal(length, 2, 4).exp()
    beta = normal(length, 2, 4).sigmoid()
    return [t.to(dtype).requires_grad_() for t in (q, k, v, decay, beta)]


def _recurrence(inputs: list[Tensor], documents: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and last state, token after token."""
    q, k, v, decay, beta = inputs
    q, k = (t.repeat_interleave(v.shape[2] // t.shape[2], 2) for t in (q, k))
    outputs = []
    for t in range(len(v)):
        if t:
            state = state * (documents[t] == documents[t - 1])[:, None, None, None]
        state = state * decay[t].exp()[..., None, None]
        read = torch.einsum("bhd,bhde->bhe", k[t], state)
        written = beta[t].unsqueeze(-1) * (v[t] - read)
        state = state + torch.einsum("bhd,bhe->bhde", k[t], written)
        outputs.append(torch.einsum("bhd,bhde->bhe", q[t], state))
    return torch.stack(outputs), state


def _assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-12)
    assert error < tolerance, error


@pytest.mark.parametrize(("length", "chunk"), LENGTHS)
@pytest.mark.parametrize("packed", [False, True])
def test_chunks_equal_the_recurrence(length: int, chunk: int, packed: bool) -> None:
    """In fp64 output, last state and all gradients agree to rounding."""
    inputs, generator = _inputs(length), torch.Generator().manual_seed(5)
    start = torch.randn(2, 4, 6, 5, generator=generator, dtype=torch.float64).requires_grad_()
    documents = torch.zeros(length, 2, dtype=torch.long)
    if packed:  # boundaries at, before and behind those of chunks, and a document of one token
        documents[[1, 2, 4]] += 1
        documents[3:, 0] += 1
        documents[min(16, length - 1) :, 1] += 1
        documents[length - 1 :] += 1
        documents = documents.cumsum(0)
    expected, last = _recurrence(inputs, documents, start)
    actual, ours = delta_rule(
        *inputs, chunk=chunk, documents=documents if packed else None, start=start
    )
    target = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    further = torch.randn(last.shape, generator=generator, dtype=torch.float64)
    _assert_close(actual, expected, 1e-12)
    _assert_close(ours, last, 1e-12)
    variables = [*inputs, start]
    ours_grads, grads = (
        torch.autograd.grad((o * target).sum() + (s * further).sum(), variables)
        for o, s in ((actual, ours), (expected, last))
    )
    for one, other in zip(ours_grads, grads, strict=True):
        _assert_close(one, other, 1e-11)


def test_gradients_are_finite_with_strong_decay() -> None:
    """Decays that overflow without a mask give finite gradients."""
    inputs = [t.detach() for t in _inputs(64, dtype=torch.float32)]
    inputs[3] = inputs[3] * 20
    inputs = [t.requires_grad_() for t in inputs]
    out, _ = delta_rule(*inputs)
    for grad in torch.autograd.grad(out.square().sum(), inputs):
        assert grad.isfinite().all()


@since("transformers", "5.23", "its reference repeats heads since then")
def test_chunks_equal_transformers() -> None:
    """fp32 output and gradients equal the reference of Qwen3-Next to rounding."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    inputs = _inputs(70, dtype=torch.float32)
    q, k, v, decay, beta = (t.transpose(0, 1) for t in inputs)
    expected, _ = modeling.torch_chunk_gated_delta_rule(q, k, v, g=decay, beta=beta)
    out, _ = delta_rule(inputs[0] * 6**-0.5, *inputs[1:])
    _assert_close(out, expected.transpose(0, 1), 2e-6)
    target = torch.linspace(-1, 1, out.numel()).view(out.shape)
    grads = [
        torch.autograd.grad((o * target).sum(), inputs) for o in (out, expected.transpose(0, 1))
    ]
    for one, other in zip(*grads, strict=True):
        _assert_close(one, other, 1e-5)
