"""The plain layers against their definitions and megatron-core's recorded values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lightning.layers.attention import CoreAttention, SelfAttention
from megatron_lightning.layers.dropout import Dropout
from megatron_lightning.layers.loss import CrossEntropy
from megatron_lightning.layers.rotary import RotaryEmbedding, apply_rotary
from megatron_lightning.models import TransformerConfig
from megatron_lightning.parallel.rng import RngStreams

ORACLES = Path(__file__).parent.parent / "oracles"
ROPE = json.loads((ORACLES / "rope_cp.json").read_text())["facts"]["rope"]
STANDARD = [
    case for case in ROPE if case["args"].keys() <= {"kv_channels", "rotary_percent", "rotary_base"}
]
QKV = json.loads((ORACLES / "hf_layout.json").read_text())["facts"]["qkv"]


@pytest.mark.parametrize("case", STANDARD, ids=lambda c: str(c["args"]))
def test_rotary_equals_megatron_core(case: dict[str, Any]) -> None:
    args, shape = case["args"], case["applied_shape"]
    index = np.arange(np.prod(shape), dtype=np.float64)
    x = torch.from_numpy(np.sin(0.37 * index + 0.1).astype(np.float32)).view(shape)
    rotary = RotaryEmbedding(
        int(args["kv_channels"] * args["rotary_percent"]), args.get("rotary_base", 10000.0)
    )
    rotated = apply_rotary(x, *rotary(shape[0], x))
    # recorded with 7 digits
    torch.testing.assert_close(
        rotated.flatten(), torch.tensor(case["applied"]), rtol=1e-5, atol=2e-6
    )
    positions = torch.arange(shape[0])[None].expand(shape[1], -1)
    assert torch.equal(apply_rotary(x, *rotary(shape[0], x, positions)), rotated)


def test_a_rotary_table_from_inference_serves_training() -> None:
    rotary = RotaryEmbedding(4, 10000.0)
    with torch.inference_mode():
        rotary(5, torch.zeros(1))
    x = torch.ones(5, 1, 1, 4, requires_grad=True)
    apply_rotary(x, *rotary(5, x)).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("case", QKV, ids=lambda c: f"{c['heads']}x{c['groups']}")
def test_fused_rows_are_grouped_as_in_megatron_core(case: dict[str, Any]) -> None:
    heads, groups, d = case["heads"], case["groups"], case["head_dim"]
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=heads, num_query_groups=groups,
        kv_channels=d, vocab_size=8,
        position_embedding_type="none",
    )  # fmt: skip
    attention = SelfAttention(config, None)
    rows = torch.tensor(
        case["megatron_row_source (q row r -> r, k -> 1000+r, v -> 2000+r)"], dtype=torch.float32
    )
    seen: list[torch.Tensor] = []
    attention.linear_qkv.forward = lambda hidden: rows.expand(*hidden.shape[:2], -1)  # type: ignore[method-assign]
    attention.core_attention.forward = lambda *given: seen.extend(given[:3]) or given[0].flatten(2)  # type: ignore[method-assign]
    attention(torch.zeros(1, 1, 8))
    q, k, v = (x.flatten() for x in seen)
    assert torch.equal(q, torch.arange(heads * d, dtype=torch.float32))
    assert torch.equal(k, torch.arange(groups * d, dtype=torch.float32) + 1000)
    assert torch.equal(v, torch.arange(groups * d, dtype=torch.float32) + 2000)


def test_attention_is_causal_and_grouped() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 2, 4, 8), torch.randn(5, 2, 2, 8), torch.randn(5, 2, 2, 8)
    scores = torch.einsum("sbnd,tbnd->bnst", q, k.repeat_interleave(2, 2)) / 8**0.5
    scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    expected = torch.einsum(
        "bnst,tbnd->sbnd", scores.softmax(-1), v.repeat_interleave(2, 2)
    ).flatten(2)
    torch.testing.assert_close(CoreAttention(0.0)(q, k, v), expected, rtol=1e-5, atol=1e-6)


def test_cross_entropy_leaves_ignored_targets_out() -> None:
    logits, targets = torch.randn(3, 2, 7), torch.tensor([[0, 6], [-100, 3], [2, -100]])
    losses = CrossEntropy()(logits.to(torch.bfloat16), targets)
    assert losses.dtype == torch.float32
    assert losses.shape == targets.shape
    assert losses[1, 0] == losses[2, 1] == 0
    assert (losses[0] > 0).all()


def test_streams_have_megatrons_seeds() -> None:
    """The stage moves all of them by 100; the tensor rank, and the expert ranks, only their own."""
    streams = RngStreams(
        1234, device=torch.device("cpu"), tp_rank=1, pp_rank=2, ep_rank=3, etp_rank=4
    )
    offsets = {
        "model-parallel-rng": 2718 + 1,
        "expert-parallel-rng": 1024 + 100 * 3 + 4,
        "data-parallel-rng": 0,
    }
    for name, offset in offsets.items():
        with streams.fork(name):
            drawn = torch.rand(3)
        assert torch.equal(
            drawn, torch.rand(3, generator=torch.Generator().manual_seed(1234 + 100 * 2 + offset))
        ), name


def test_dropout_draws_from_the_stream_of_its_rank() -> None:
    streams = [RngStreams(1, device=torch.device("cpu"), tp_rank=rank) for rank in (0, 1)]
    x, masks = torch.ones(64), []
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for stream in streams:
        dropout = Dropout(0.5)
        dropout.streams = stream
        masks.append(dropout(x))
        assert torch.equal(dropout.eval()(x), x)
    assert not torch.equal(*masks)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(Dropout(0.5)(x), x)
    assert not torch.equal(torch.get_rng_state(), before)
