"""Parts of a bf16 model that may stay in fp32: the residual stream, attention, logits; on one
device and on stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.layers.attention.self_attention import CoreAttention
from megatron_lightning.models import GPTModel
from tests.helpers.layouts import tiny_config
from tests.helpers.ranks import run_ranks
from tests.parity.test_fully_sharded import PP, _train

SIZES: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 64,
    "vocab_size": 50,
}
PRECISE = {
    "fp32_residual_connection": True,
    "attention_softmax_in_fp32": True,
    "logits_in_fp32": True,
}


def _logits(dtype: torch.dtype, **options: Any) -> tuple[Tensor, set[torch.dtype]]:
    """Return the logits of one batch, from weights that bf16 holds exactly, and the dtypes of what
    the layers hand on."""
    model, seen = (
        GPTModel(tiny_config(**SIZES, **options)).bfloat16().to(dtype),
        set[torch.dtype](),
    )
    for layer in model.decoder.layers.values():
        layer.register_forward_hook(lambda *args: seen.add(args[2].dtype))
    tokens = torch.arange(96).view(2, 48) * 7 % 50
    return model(tokens), seen


@pytest.mark.parametrize(
    "kind", [{}, {"normalization": "LayerNorm", "add_bias_linear": True, "qk_layernorm": True}]
)
def test_an_fp32_residual_stream_is_nearer_to_fp32(kind: dict[str, Any]) -> None:
    exact, _ = _logits(torch.float32, **kind)
    plain, plain_seen = _logits(torch.bfloat16, **kind)
    precise, seen = _logits(torch.bfloat16, **PRECISE, **kind)
    assert plain_seen == {torch.bfloat16}
    assert seen == {torch.float32}
    assert (plain.dtype, precise.dtype) == (torch.bfloat16, torch.float32)
    # How much depends on the CPU's kernels.
    assert (precise - exact).norm() < (plain.float() - exact).norm()


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", PRECISE)
def test_nothing_changes_in_an_fp32_model(name: str) -> None:
    assert torch.equal(_logits(torch.float32, **{name: True})[0], _logits(torch.float32)[0])


def test_attention_in_fp32_ignores_autocast() -> None:
    q, k, v = torch.randn(3, 48, 2, 4, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, precise = CoreAttention(0.0)(q, k, v), CoreAttention(0.0, in_fp32=True)(q, k, v)
    exact = CoreAttention(0.0)(q, k, v)
    assert torch.equal(precise, exact)
    assert not torch.equal(cast.float(), exact)


@pytest.mark.slow
def test_stages_hand_on_the_fp32_stream() -> None:
    """The first norm to one bf16 rounding of the logits' gradient; 2e-2 later, as in
    test_precision."""
    expected = run_ranks(
        1, _train, 1, ("one", {}, {"micro_batch_size": 1}, 1), PRECISE, "bf16-true", "ddp"
    )[0]
    case = ("pp2", {}, {PP: 2, "micro_batch_size": 1}, 1)
    for rank in run_ranks(2, _train, 2, case, PRECISE, "bf16-true", "ddp", timeout_s=100):
        assert rank[1][0] == pytest.approx(expected[1][0], rel=4e-3)
        assert rank[1] == pytest.approx(expected[1], rel=2e-2)
