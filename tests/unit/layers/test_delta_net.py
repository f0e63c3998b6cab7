"""Parts of gated delta net: documents in a fused kernel, half precision, autocast, initial
values."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.config import DeltaNetConfig
from megatron_lightning.layers import SequenceInfo
from megatron_lightning.layers.state_space import delta_kernel
from megatron_lightning.layers.state_space.delta_kernel import DeltaKernel, load_kernel
from megatron_lightning.layers.state_space.delta_net import GatedDeltaNet
from megatron_lightning.layers.state_space.delta_rule import delta_rule
from megatron_lightning.models import GPTModel
from megatron_lightning.parallel.documents import Documents
from tests.helpers.layouts import tiny_config

SIZES = DeltaNetConfig(
    num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=8, chunk_size=8
)
MODEL = tiny_config(vocab_size=16, delta_net=SIZES, linear_attention_freq=2)
DOCUMENTS = Documents(((0, 5, 6, 20), (0, 20)))


def _fla(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float,
    cu_seqlens: Tensor | None, use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute as ``chunk_gated_delta_rule`` of flash-linear-attention: [rows, tokens, heads, d],
    equal numbers of heads, and documents in a single row.
    """
    assert scale == 1.0 and not use_qk_l2norm_in_kernel
    assert q.shape[2] == v.shape[2] and all(t.is_contiguous() for t in (q, k, v, g, beta))
    ends = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    assert cu_seqlens is None or len(q) == 1
    outputs = []
    for start, stop in pairwise(ends):
        own = (t[:, start:stop].transpose(0, 1) for t in (q, k, v, g, beta))
        outputs.append(delta_rule(*own)[0])
    return torch.cat(outputs).transpose(0, 1), None


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_a_fused_kernel_gets_its_layout(documents: Documents | None) -> None:
    """Output and gradients equal torch's in fp32."""

    class Always(DeltaKernel):
        @staticmethod
        def takes(x: Tensor) -> bool:
            return True

    torch.manual_seed(3)  # a gradient of other weights is a sum that all but cancels
    mixer = GatedDeltaNet(MODEL, SIZES)
    hidden = torch.randn(20, 2, 32, generator=torch.Generator().manual_seed(1))
    results = []
    for kernel in (None, Always(_fla)):
        mixer.kernel = kernel
        mixer.zero_grad()
        out = mixer(hidden, SequenceInfo(documents=documents))
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in mixer.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)


def test_no_kernel_is_loaded_without_a_gpu() -> None:
    assert load_kernel() is None
    x = torch.empty(0, dtype=torch.bfloat16)
    assert not DeltaKernel.takes(x)


@pytest.mark.parametrize(
    ("capability", "triton", "tilelang", "loads"),
    [
        ((9, 0), "3.6.0", None, False),
        ((9, 0), "3.6.0", object(), True),
        ((9, 0), "3.3.1", None, True),
        ((9, 0), "3.7.1", None, True),
        ((10, 0), "3.6.0", None, True),
    ],
)
def test_kernels_without_gradients_are_not_loaded(
    capability: tuple[int, int],
    triton: str,
    tilelang: object,
    loads: bool,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    """flash-linear-attention refuses backward on Hopper with some versions of Triton."""
    function = lambda **_: None  # noqa: E731
    package = SimpleNamespace(chunk_gated_delta_rule=function)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(delta_kernel.importlib, "import_module", lambda _: package)
    monkeypatch.setattr(delta_kernel, "version", lambda _: triton)
    monkeypatch.setattr(delta_kernel, "find_spec", lambda _: tilelang)
    assert (load_kernel() is not None) == loads
    assert any("triton 3.7.1" in str(each.message) for each in recwarn) != loads


def test_decays_stay_in_fp32_in_half_precision() -> None:
    """In bf16 and under autocast, outputs differ from fp32 by roundings of bf16 alone."""
    torch.manual_seed(0)
    mixer = GatedDeltaNet(MODEL, SIZES)
    hidden = torch.randn(40, 2, 32, generator=torch.Generator().manual_seed(1))
    expected = mixer(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = mixer(hidden)
    half = mixer.bfloat16()
    assert {n for n, p in half.named_parameters() if p.dtype is torch.float32} == {
        "A_log", "dt_bias",
    }  # fmt: skip
    out = half(hidden.bfloat16())
    assert mixed.dtype is out.dtype is torch.bfloat16
    for found in (mixed, out):  # bf16 has 8 bits: 2^-8 a rounding, of five in a row
        assert (found - expected).abs().max() < 0.02 * expected.abs().max()


def test_initial_values_are_those_of_the_authors() -> None:
    model = GPTModel(MODEL)
    mixer: Any = model.decoder.layers["0"].self_attention
    assert mixer.dt_bias.eq(1).all() and mixer.out_norm.weight.eq(1).all()
    assert mixer.A_log.exp().min() >= 1 and mixer.A_log.exp().max() <= 16
    assert mixer.conv1d.weight.abs().max() <= 0.5
    assert not isinstance(model.decoder.layers["1"].self_attention, GatedDeltaNet)
