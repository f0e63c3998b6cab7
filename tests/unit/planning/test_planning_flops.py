"""FLOPs and Megatron's estimate of memory equal what megatron-core computed
(``tests/oracles/flops_and_memory.json``); what it has no case of equals torch's counter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_lightning import planning
from megatron_lightning.config import (
    DeltaNetConfig,
    LatentAttentionConfig,
    MambaConfig,
    MoEConfig,
    TransformerConfig,
)
from megatron_lightning.errors import ConfigError
from megatron_lightning.models import GPTModel
from megatron_lightning.models.costs import pair_channels, visible_pairs
from megatron_lightning.parallel.grid.layout import ParallelLayout
from tests.helpers.layouts import tiny_config

FACTS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "oracles" / "flops_and_memory.json").read_text()
)["facts"]
ARGUMENTS: dict[str, dict[str, Any]] = {
    row["model"]: row["args"] for row in FACTS["flops"] if row.get("args")
}
SIZES: dict[str, Any] = {
    "hidden_size": 64, "vocab_size": 96,
    "max_sequence_length": 64, "ffn_hidden_size": 160,
}  # fmt: skip


def config_of(model: str) -> TransformerConfig:
    """Return the config of one of Megatron's argument lists."""
    given = ARGUMENTS[model]
    moe = None
    if "num_experts" in given:
        moe = MoEConfig(
            num_experts=given["num_experts"],
            router_topk=given["moe_router_topk"],
            ffn_hidden_size=given["moe_ffn_hidden_size"],
            layer_freq=given["moe_layer_freq"],
        )
    return TransformerConfig(
        num_layers=given["num_layers"],
        hidden_size=given["hidden_size"],
        ffn_hidden_size=given["ffn_hidden_size"],
        num_attention_heads=given["num_attention_heads"],
        num_query_groups=given.get("num_query_groups"),
        vocab_size=given["padded_vocab_size"],
        max_sequence_length=given["seq_length"],
        normalization=given["normalization"],
        activation="swiglu" if given["swiglu"] else "gelu",
        add_bias_linear=given.get("add_bias_linear", True),
        share_embeddings_and_output_weights=not given["untie_embeddings_and_output_weights"],
        moe=moe,
    )


def test_flops_equal_the_oracle() -> None:
    assert len(FACTS["flops"]) == 20
    for row in FACTS["flops"]:
        model = row["model"]
        counted = planning.flops(
            config_of(model),
            batch_size=row["global_batch_size"],
            sequence_length=ARGUMENTS[model]["seq_length"],
            document_lengths=row.get("packed_lengths"),
        )
        assert counted == row["flops_per_iteration"], row


def test_mamba_counts_by_megatrons_estimate() -> None:
    """Its formula for a layer of Nemotron-H-8B: projections, and 7 operations for each element of
    the state. Documents do not change the count."""
    h, heads, head_dim, groups, state, tokens = 4096, 128, 64, 8, 128, 8192
    config = TransformerConfig(
        layer_pattern="M", hidden_size=h, num_attention_heads=32, vocab_size=1,
        mamba=MambaConfig(
            num_heads=heads, head_dim=head_dim, num_groups=groups, state_dim=state
        ),
    )  # fmt: skip
    inner = heads * head_dim
    forward = 2 * tokens * h * (2 * inner + 2 * groups * state + heads)
    forward += 7 * tokens * inner * state + 2 * tokens * inner * h
    output = 2 * tokens * h
    assert round(forward / tokens / 1e6) == 226
    for lengths in (None, [1000, 7192]):
        counted = planning.flops(
            config, batch_size=1, sequence_length=tokens, document_lengths=lengths
        )
        assert counted == 3 * (forward + output)


def test_megatrons_estimate_equals_the_oracle() -> None:
    assert len(FACTS["memory"]) == 89
    for row in FACTS["memory"]:
        sizes = dict(row["parallel"])
        world_size = sizes.pop("world_size")
        distributed = sizes.pop("use_distributed_optimizer", False)
        estimate = planning.megatron_memory(
            config_of(row["model"]),
            ParallelLayout(**sizes),
            world_size=world_size,
            sequence_length=ARGUMENTS[row["model"]]["seq_length"],
            micro_batch_size=row["micro_batch_size"],
            num_microbatches=row["num_microbatches"],
            distributed_optimizer=distributed,
        )
        for name, value in estimate._asdict().items():
            assert value == pytest.approx(row[name], rel=1e-12), (name, row)


LATENT = LatentAttentionConfig(
    q_lora_rank=24, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=12
)
COUNTED: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "gelu": {"activation": "gelu", "add_bias_linear": True},
    "grouped queries": {"num_query_groups": 2, "kv_channels": 24},
    "tied": {"share_embeddings_and_output_weights": True},
    "experts": {"moe": MoEConfig(num_experts=8, router_topk=3, ffn_hidden_size=48)},
    "shared experts, every second layer": {
        "moe": MoEConfig(
            num_experts=4, ffn_hidden_size=48, shared_expert_intermediate_size=32, layer_freq=2
        )
    },
    "experts in latents": {
        "moe": MoEConfig(num_experts=4, latent_size=24, shared_expert_intermediate_size=32)
    },
    "latent attention": {"mla": LATENT},
    "latent attention, full queries": {
        "mla": LatentAttentionConfig(
            q_lora_rank=None, kv_lora_rank=16, qk_head_dim=12, qk_pos_emb_head_dim=4, v_head_dim=16
        )
    },
}


@pytest.mark.parametrize("name", COUNTED)
def test_flops_equal_torchs_counter(name: str) -> None:
    """Products of attention are left out: torch counts those of a query with keys that it does not
    see as well."""
    config = tiny_config(**SIZES | COUNTED[name])
    model, length, batch = GPTModel(config), 32, 2
    tokens = torch.randint(0, config.vocab_size, (batch, length))
    grouped = torch.ops.megatron_lightning.grouped_mm

    def grouped_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
        # [t, k], [E, k, n]; backward also [m, t], [t, n]: a row meets one matrix.
        return 2 * a[0] * a[1] * b[-1]

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def nothing(*_: Any, **__: Any) -> int:
        return 0

    counter = FlopCounterMode(
        display=False,
        custom_mapping={
            grouped: grouped_flops, attention: nothing, attention_backward: nothing,
        },
    )  # fmt: skip
    with counter:
        model(tokens).mean().backward()
    pairs = 6 * batch * config.num_layers * visible_pairs(length) * pair_channels(config)
    expected = planning.flops(config, batch_size=batch, sequence_length=length) - pairs
    if config.moe is not None:  # the router, which Megatron leaves out
        layers = config.layer_kinds.count("expert")
        expected += 6 * batch * length * layers * config.hidden_size * config.moe.num_experts
    if config.mla is not None:  # norms of the latents, which Megatron counts
        latents = (config.mla.q_lora_rank or 0) + config.mla.kv_lora_rank
        expected -= 6 * batch * length * config.num_layers * latents
    assert counter.get_total_flops() == expected


@pytest.mark.parametrize("window", [None, 0, 5, 31, 100])
def test_visible_pairs_are_those_that_a_query_sees(window: int | None) -> None:
    """Products of a query with the keys that it sees, counted by torch. Megatron counts the product
    with its own key half: s^2 / 2 pairs of a causal sequence, and not s (s + 1) / 2."""
    length, channels = 32, 4
    q, k = torch.randn(length, channels), torch.randn(length, channels)
    counter = FlopCounterMode(display=False)
    with counter:
        for i in range(length):
            first = 0 if window is None else max(0, i - window)
            q[i : i + 1] @ k[first : i + 1].t()
    counted = counter.get_total_flops() / (2 * channels)
    given = None if window is None else (window, 0)
    reach = length if window is None else min(length, window + 1)
    assert visible_pairs(length, given) == counted - reach / 2
    assert visible_pairs(length, None) == length**2 / 2


def test_wrong_numbers_are_errors() -> None:
    config = tiny_config(**SIZES)
    with pytest.raises(ConfigError, match="batch_size is 0; it must be a positive integer"):
        planning.flops(config, batch_size=0, sequence_length=8)
    with pytest.raises(ConfigError, match=r"document_lengths are 9 tokens .* sequence_length is 8"):
        planning.flops(config, batch_size=1, sequence_length=8, document_lengths=[5, 4])
    for wrong in (-5, 0, 1.5, "2"):
        with pytest.raises(ConfigError, match=rf"document_lengths has {wrong!r}; each length"):
            planning.flops(config, batch_size=1, sequence_length=8, document_lengths=[wrong, 4])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="config is None, and must be a TransformerConfig"):
        planning.flops(None, batch_size=1, sequence_length=8)  # type: ignore[arg-type]


def test_gated_delta_net_counts_four_products_of_a_state() -> None:
    """As Megatron-LM's formula: projections, convolution, and 4 x key x value for each state."""
    own = DeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=16)
    frequency = [1, 0]
    config = tiny_config(**SIZES, delta_net=own, linear_attention_freq=frequency)
    plain = tiny_config(**SIZES)
    h, tokens = 64, 48
    mixer = h * (2 * 32 + 2 * 64 + 2 * 4) + 4 * (2 * 32 + 64) + 4 * 16 * 16 * 4 + h * 64
    attention = h * 4 * h + tokens / 2 * 2 * h
    counts = {"batch_size": 3, "sequence_length": tokens}
    difference = planning.flops(config, **counts) - planning.flops(plain, **counts)
    assert difference == 6 * 3 * tokens * (mixer - attention)
