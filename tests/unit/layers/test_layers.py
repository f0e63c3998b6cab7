"""The plain layers against their definitions and megatron-core's recorded values."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lightning.layers.attention.rotary import (
    RotaryEmbedding,
    apply_rotary,
    inverse_frequencies,
)
from megatron_lightning.layers.attention.self_attention import CoreAttention, SelfAttention
from megatron_lightning.layers.dropout import Dropout
from megatron_lightning.layers.losses.loss import CrossEntropy
from megatron_lightning.models import RopeScaling
from megatron_lightning.parallel.random.rng import RngStreams
from tests.helpers.layouts import tiny_config

ORACLES = Path(__file__).parents[2] / "oracles"
ROPE = json.loads((ORACLES / "rope_cp.json").read_text())["facts"]
OTHER_ROTATIONS = {"seq_len_interpolation_factor"}
ROTATIONS = [case for case in ROPE["rope"] if not case["args"].keys() & OTHER_ROTATIONS]
QKV = json.loads((ORACLES / "hf_layout.json").read_text())["facts"]["qkv"]


def llama3(factor: float = 8.0, original: int = 8192, **options: Any) -> RopeScaling:
    return RopeScaling(
        rope_type="llama3", factor=factor, original_max_position_embeddings=original, **options
    )


def yarn(factor: float = 40.0, original: int = 4096, **options: Any) -> RopeScaling:
    return RopeScaling(
        rope_type="yarn", factor=factor, original_max_position_embeddings=original, **options
    )


@pytest.mark.parametrize("case", ROTATIONS, ids=lambda c: str(c["args"]))
def test_rotary_equals_megatron_core(case: dict[str, Any]) -> None:
    args, shape = case["args"], case["applied_shape"]
    index = np.arange(np.prod(shape), dtype=np.float64)
    x = torch.from_numpy(np.sin(0.37 * index + 0.1).astype(np.float32)).view(shape)
    rotary = RotaryEmbedding(
        int(args["kv_channels"] * args["rotary_percent"]),
        args.get("rotary_base", 10000.0),
        llama3(args.get("rope_scaling_factor", 8.0)) if "rope_scaling" in args else None,
    )
    in_pairs = args.get("rotary_interleaved", False)
    rotated = apply_rotary(x, *rotary(shape[0], x), interleaved=in_pairs)
    expected = torch.tensor(case["applied"]).view(shape)
    if in_pairs:  # ours has the pairs at i and i + r/2
        expected = expected.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    # recorded with 7 digits
    torch.testing.assert_close(rotated, expected, rtol=1e-5, atol=2e-6)
    positions = torch.arange(shape[0])[None].expand(shape[1], -1)
    table = rotary(shape[0], x, positions)
    assert torch.equal(apply_rotary(x, *table, interleaved=in_pairs), rotated)


def test_frequencies_of_llama_3_1_equal_megatron_core() -> None:
    expected = torch.tensor(ROPE["inv_freq_llama3_1_hd128"])
    frequencies = inverse_frequencies(128, 500000.0, llama3())
    torch.testing.assert_close(frequencies, expected, rtol=0, atol=6e-8)  # recorded to 1e-7


def test_rotated_attention_does_not_keep_the_projection_output() -> None:
    """Values are copied out of it, beside rotated queries and keys."""
    config = tiny_config(
        num_layers=1, hidden_size=64, num_attention_heads=8, num_query_groups=2, vocab_size=8
    )
    attention = SelfAttention(config, RotaryEmbedding(config.head_dim, 10000.0))
    kept: set[int] = set()

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.add(x.untyped_storage().nbytes() // x.element_size())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        attention(torch.randn(16, 3, 64))
    assert 16 * 3 * config.head_dim * 8 in kept
    assert 16 * 3 * config.qkv_rows not in kept


@pytest.mark.parametrize("case", ROPE["yarn"], ids=lambda c: str(c["args"]["mscale_all_dim"]))
def test_yarn_equals_megatron_core(case: dict[str, Any]) -> None:
    args = dict(case["args"])
    dim, percent, base = (
        args.pop(name) for name in ("kv_channels", "rotary_percent", "rotary_base")
    )
    scaling = yarn(args.pop("scaling_factor"), args.pop("original_max_position_embeddings"), **args)
    angles = 3 * inverse_frequencies(int(dim * percent), float(base), scaling)
    # recorded to 1e-7
    torch.testing.assert_close(angles.repeat(2), torch.tensor(case["emb_pos3"]), rtol=0, atol=6e-7)
    assert scaling.sharpness == pytest.approx(case["mscale"], rel=1e-12)
    cosines, sines = RotaryEmbedding(dim, base, scaling)(4, torch.zeros(1))
    torch.testing.assert_close(cosines[3, 0], angles.cos() * case["mscale"], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(sines[3, 0], angles.sin() * case["mscale"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "scaling",
    [
        llama3(),
        llama3(32.0, 2048, low_freq_factor=2.0, high_freq_factor=16.0),
        llama3(1.0),
        yarn(),
        yarn(4.0, 32768),
        yarn(4.0, 64),  # no channel turns beta_fast times
        yarn(4.0, 8192, beta_slow=0.1),  # with the smallest base all channels turn beta_slow times
        yarn(16.0, 1024, beta_fast=16.0, beta_slow=2.0, correction_range_round_to_int=False),
        yarn(40.0, 4096, mscale=0.7, mscale_all_dim=1.2),
        yarn(1.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("base", [100.0, 10000.0, 500000.0])
def test_scaled_frequencies_equal_hugging_face(scaling: RopeScaling, base: float) -> None:
    transformers = pytest.importorskip("transformers")
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    theirs = asdict(scaling) | {"rope_theta": base}
    theirs["truncate"] = theirs.pop("correction_range_round_to_int")
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=1 << 20,
        rope_parameters=theirs,
    )  # fmt: skip
    expected, factor = functions[scaling.rope_type](config, device="cpu")
    # A few roundings in fp32: the products are taken in another order.
    torch.testing.assert_close(inverse_frequencies(64, base, scaling), expected, rtol=5e-7, atol=0)
    assert scaling.sharpness == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    ("original", "base", "divisor"),
    [(4, 10000.0, 40.0), (4096, 3.0, 1.0)],
    ids=["no channel turns once", "all channels turn often"],
)
def test_yarn_divides_all_low_frequencies_and_no_high_ones(
    original: int, base: float, divisor: float
) -> None:
    scaled = inverse_frequencies(8, base, yarn(original=original))
    torch.testing.assert_close(scaled[1:], inverse_frequencies(8, base)[1:] / divisor)


@pytest.mark.parametrize("scaling", [llama3(original=8), yarn(original=8)], ids=str)
def test_scaled_positions_may_restart(scaling: RopeScaling) -> None:
    rotary, x = RotaryEmbedding(8, 10000.0, scaling), torch.zeros(1)
    table = rotary(12, x)
    position_ids = torch.tensor([[0, 1, 2, 0, 1], [7, 8, 11, 3, 4]])
    for full, picked in zip(table, rotary(5, x, position_ids), strict=True):
        assert torch.equal(full[position_ids.t(), 0], picked)
    assert rotary(12, x)[0] is table[0]
    assert not rotary.state_dict() and not list(rotary.buffers())
    compiled = torch.compile(rotary, backend="aot_eager", fullgraph=True)
    for full, traced in zip(table, compiled(12, x), strict=True):
        assert torch.equal(full, traced)


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
    config = tiny_config(
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
