"""LongRoPE: a document chooses its frequencies by its own length, on every way to a layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.bridge import AutoBridge
from megatron_lightning.config import LatentAttentionConfig, RopeScaling, TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.models.transformer import GPTModel
from tests.helpers.gpt_folders import make_folder, make_model, tokens
from tests.helpers.layouts import tiny_config

LONG = RopeScaling(
    rope_type="longrope",
    factor=4.0,
    original_max_position_embeddings=8,
    short_factor=(1.0, 1.1, 1.3, 1.4),
    long_factor=(1.2, 2.0, 3.5, 5.0),
)
LATENT = LatentAttentionConfig(
    q_lora_rank=12, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=8, v_head_dim=6
)
CONFIGS = {
    "grouped": tiny_config(rope_scaling=LONG),
    "latent": tiny_config(rope_scaling=LONG, mla=LATENT),
}


@pytest.mark.parametrize("length", [8, 9])
def test_both_sides_of_the_pretraining_are_those_of_transformers(
    length: int, tmp_path: Path
) -> None:
    ours = AutoBridge.from_hf_pretrained(make_folder("phi3-long", tmp_path)).to_model("gpt").eval()
    rows = tokens(1, length)
    expected = make_model("phi3-long")(rows).logits
    # fp32, sums in another order
    assert (ours(rows) - expected).abs().max() <= 1e-5 * expected.abs().max()
    scaling = ours.config.rope_scaling
    divisors = scaling.short_factor if length > 8 else scaling.long_factor
    other = replace(scaling, short_factor=divisors, long_factor=divisors)
    wrong = GPTModel(replace(ours.config, rope_scaling=other)).eval()
    wrong.load_state_dict(ours.state_dict())
    assert (wrong(rows) - expected).abs().max() > 1e-3 * expected.abs().max()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_document_is_what_it_is_alone(name: str) -> None:
    config = CONFIGS[name]
    model, rows = GPTModel(config).eval(), tokens(1, 16) % config.vocab_size
    expected = [model(rows[:, :5]), model(rows[:, 5:])]
    documents = torch.tensor([[0] * 5 + [1] * 11])
    packed = model(rows, document_ids=documents)
    # fp32, sums in another order
    torch.testing.assert_close(packed, torch.cat(expected, 1), rtol=1e-5, atol=1e-5)
    padded = model(rows, padding=torch.arange(16)[None] >= 5)
    torch.testing.assert_close(padded[:, :5], expected[0], rtol=1e-5, atol=1e-5)
    # Positions say as much as the length.
    positions = torch.arange(5)[None]
    assert torch.equal(model(rows[:, :5], position_ids=positions), expected[0])


def test_rows_of_a_batch_do_not_depend_on_each_other() -> None:
    model, rows = GPTModel(CONFIGS["grouped"]).eval(), tokens(2, 12) % 64
    padding = torch.arange(12) >= torch.tensor([[12], [6]])
    both = model(rows, padding=padding)
    torch.testing.assert_close(both[:1], model(rows[:1]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(both[1:, :6], model(rows[1:, :6]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"short_factor": None}, r"short_factor is None.*one for every two"),
        ({"long_factor": (1.0, 0.0)}, r"long_factor is \(1.0, 0.0\)"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings"),
        ({"original_max_position_embeddings": 1}, "longrope divides by its logarithm"),
        ({"attention_factor": 0.0}, "attention_factor is 0.0"),
        ({"beta_fast": 3.0}, "beta_fast=3.0 is an option of yarn"),
        ({"rope_type": "linear"}, "original_max_position_embeddings=8 with rope_type=linear"),
    ],
)  # fmt: skip
def test_values_that_cannot_work_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(LONG, **changes)


def test_every_frequency_has_a_divisor() -> None:
    with pytest.raises(ConfigError, match=r"has 4 entries, and 6 .* 3 frequencies"):
        tiny_config(rope_scaling=LONG, kv_channels=6)
    with pytest.raises(ConfigError, match="rotary_interleaved is set, and position_embedding_type"):
        tiny_config(rotary_interleaved=True, position_embedding_type="none")
    config = tiny_config(rope_scaling=LONG, no_rope_freq=2, rotary_interleaved=True)
    assert not config.of_layer(1).rotary_interleaved and config.of_layer(0).rotary_interleaved
    assert TransformerConfig(**config.to_dict()) == config
