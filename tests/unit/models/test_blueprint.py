"""The blueprint has one row for each parameter of :class:`GPTModel`, in order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lightning.config import (
    DeltaNetConfig,
    LatentAttentionConfig,
    MambaConfig,
    MoEConfig,
    RecomputeOptions,
)
from megatron_lightning.config.layer_kinds import GROUPS, LAYER_KINDS, entry_of
from megatron_lightning.errors import ConfigError
from megatron_lightning.models import GPTModel, num_parameters
from megatron_lightning.models.blueprint import LAYER_WEIGHTS, layer_weights, model_weights
from megatron_lightning.models.transformer_layers import LAYERS
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.planning import flops
from megatron_lightning.planning.ledger.activation_memory import LEDGERS, stage_profile
from megatron_lightning.planning.ledger.layer_tapes import Sizes
from megatron_lightning.planning.ledger.precision_bytes import precision_of
from megatron_lightning.planning.ledger.rank_parameters import local_size
from tests.helpers.kept_bytes import kept_bytes
from tests.helpers.layouts import tiny_config

SIZES: dict[str, Any] = {
    "num_layers": 3, "hidden_size": 64, "num_query_groups": 2,
    "vocab_size": 101, "max_sequence_length": 32, "ffn_hidden_size": 48,
}  # fmt: skip
OWN_KIND = "tests.helpers.squashed_layer.Squashed"
FLOPS: dict[str, int] = {"batch_size": 2, "sequence_length": 32}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
GPT2 = {
    "normalization": "LayerNorm", "activation": "gelu", "add_bias_linear": True,
    "position_embedding_type": "learned_absolute", "share_embeddings_and_output_weights": True,
}  # fmt: skip
EXPERTS = MoEConfig(
    num_experts=4, layer_freq=[0, 1, 1], shared_expert_intermediate_size=24, shared_expert_gate=True
)
MAMBA = {"layer_pattern": ["dense", "mamba", "mamba"]}
DELTA = DeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=12)
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-Next": {
        "delta_net": DELTA, "linear_attention_freq": 3, "moe": EXPERTS, "mtp_num_layers": 1,
    },
    "gated delta net alone": {
        "delta_net": DELTA, "linear_attention_freq": [0, 1, 1], "mtp_num_layers": 1,
    },
    "gated delta net by pattern": {"delta_net": DELTA, "num_layers": 0, "layer_pattern": "G-*G"},
    "hybrid": {"mamba": MambaConfig(head_dim=16, num_groups=2), "mtp_num_layers": 1} | MAMBA,
    "Llama": {},
    "Qwen 2": {"add_qkv_bias": True, "kv_channels": 24},
    "Qwen 3": {"qk_layernorm": True},
    "gates": {"attention_output_gate": True, "add_qkv_bias": True},
    "OLMoE": {
        "qk_layernorm": True, "qk_layernorm_per_head": False, "moe": MoEConfig(num_experts=4),
    },
    "GPT-2": GPT2 | {"num_query_groups": None},
    "gpt-oss": {
        "softmax_type": "learnable", "add_bias_linear": True, "window_size": (4, 0),
        "window_attn_skip_freq": 2, "moe": MoEConfig(num_experts=4, router_bias=True),
    },
    "Cohere": {
        "norm_placement": "parallel", "normalization": "LayerNorm", "layernorm_bias": False,
        "mtp_num_layers": 1,
    },
    "Gemma 2": {"norm_placement": "sandwich", "activation": "geglu_tanh"},
    "experts": {"moe": EXPERTS, "mtp_num_layers": 2},
    "experts in latents": {
        "moe": replace(EXPERTS, latent_size=20), "mtp_num_layers": 1, "add_bias_linear": True,
    },
    "experts with biases": GPT2 | {"moe": EXPERTS, "qk_layernorm": True, "mtp_num_layers": 1},
    "pattern": {
        "num_layers": 0, "layer_pattern": "*-|E*-E/*-/*-", "moe": MoEConfig(num_experts=4),
    },
    "pattern with latent attention": {
        "num_layers": 0, "layer_pattern": "+-+", "num_query_groups": None,
        "mla": LatentAttentionConfig(q_lora_rank=16, **LATENT),
    },
    "DeepSeek": {
        "num_query_groups": None, "qk_layernorm": True, "moe": EXPERTS,
        "mla": LatentAttentionConfig(q_lora_rank=16, **LATENT),
    },
    "DeepSeek without latents of queries": {
        "num_query_groups": None, "mla": LatentAttentionConfig(q_lora_rank=None, **LATENT),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_the_parameters_of_the_model(name: str) -> None:
    config = tiny_config(**SIZES | MODELS[name])
    with torch.device("meta"):
        model = GPTModel(config)
    parameters = {path: tuple(p.shape) for path, p in model.named_parameters()}
    rows = {weight.path: weight.shape for weight in model_weights(config)}
    assert list(rows.items()) == list(parameters.items())
    assert num_parameters(config) == sum(p.numel() for p in model.parameters())


def test_a_layer_is_known_by_its_index() -> None:
    config = tiny_config(**SIZES | MODELS["experts"])
    dense, expert = ({weight.module for weight in layer_weights(config, index)} for index in (0, 1))
    assert "mlp.linear_fc1" in dense - expert
    assert "mlp.router" in expert - dense


def test_every_kind_of_layer_is_built_weighed_and_planned() -> None:
    for entries in (LAYERS, LAYER_WEIGHTS, LEDGERS):
        assert set(entries) == set(LAYER_KINDS)


@pytest.mark.parametrize("kind", [*LAYER_KINDS, OWN_KIND])
def test_the_ledger_has_every_matrix_of_a_layer_once(kind: str) -> None:
    """Gradients of matrices, on a rank of two tensor and two expert ranks."""
    experts = MoEConfig(
        num_experts=4, ffn_hidden_size=32, shared_expert_intermediate_size=16, latent_size=24
    )
    more: dict[str, Any] = {"moe": experts} if kind in GROUPS["moe"] else {}
    if kind == "mamba":
        more["mamba"] = MambaConfig(head_dim=16, num_groups=2, state_dim=16)
    if kind == "delta_net":
        more["delta_net"] = DELTA
    config = tiny_config(**SIZES | more | {"layer_pattern": [kind] * 3})
    layout = ParallelLayout(
        tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1
    )
    sizes = Sizes(
        config=config, layout=layout, precision=precision_of("32-true"), device="cpu",
        sequence_length=32, micro_batch_size=2, split_backward=False,
    )  # fmt: skip
    unit = "decoder.layers.1"
    tape = entry_of(kind, LEDGERS, "ledger")(sizes, unit, "stream")
    planned = {one.path: one.weight_gradient_bytes for one in tape if one.weight_gradient_bytes}
    assert planned == {
        f"{unit}.{weight.module}": 4 * local_size(weight, layout).total
        for weight in layer_weights(config, 1)
        if weight.kind == "matrix"
    }


def test_a_users_kind_of_layer() -> None:
    pattern = ["dense", OWN_KIND, "dense"]
    config = tiny_config(**SIZES | {"layer_pattern": pattern})
    model = GPTModel(config)
    parameters = [path for path, _ in model.named_parameters()]
    assert [weight.path for weight in model_weights(config)] == parameters
    sizes = Sizes(
        config=config, layout=ParallelLayout(), precision=precision_of("32-true"), device="cpu",
        sequence_length=32, micro_batch_size=2, split_backward=False,
    )  # fmt: skip
    planned = stage_profile(sizes, ["decoder.layers.1"], RecomputeOptions()).kept
    assert planned == kept_bytes(model.decoder.layers["1"], batch=2, sequence=32)
    without = flops(tiny_config(**SIZES | {"num_layers": 2}), **FLOPS)
    gate_up_down = 6 * FLOPS["batch_size"] * FLOPS["sequence_length"] * 3 * 64 * 48
    assert flops(config, **FLOPS) == without + gate_up_down


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_pattern": ["dense"]}, "layer_pattern has 1 entries, and num_layers is 3"),
        ({"layer_pattern": ["dense", "rwkv", "dense"]}, "names 'rwkv', which is neither dense"),
        ({"layer_pattern": ["dense", "mamba", "dense"]}, "no mamba describes mixers of Mamba-2"),
        ({"mamba": MambaConfig()}, "mamba is set, and without layer_pattern"),
        ({"mamba": MambaConfig(head_dim=24)} | MAMBA, "head_dim is 24, which does not divide"),
        ({"mamba": MambaConfig(head_dim=32)} | MAMBA, "num_groups is 8, and 4 heads"),
        ({"mamba": {"state_dim": 0}} | MAMBA, r"mamba\.state_dim is 0"),
        (
            {"mamba": MambaConfig(head_dim=16), "norm_placement": "sandwich"} | MAMBA,
            "norm_placement is sandwich",
        ),
        ({"layer_pattern": ["dense", "no.module.Kind", "dense"]}, "cannot be imported"),
        ({"layer_pattern": ["dense", "expert", "dense"]}, "no moe describes experts"),
        ({"layer_pattern": ["dense"] * 3, "moe": MoEConfig(num_experts=4)}, "moe describes"),
        (
            {"layer_pattern": ["dense", "expert", "expert"], "moe": EXPERTS},
            r"moe\.layer_freq is \(0, 1, 1\); both",
        ),
    ],
)
def test_patterns_that_do_not_fit_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(**SIZES | options)


def test_a_pattern_means_what_layer_freq_means() -> None:
    every = MoEConfig(num_experts=4, shared_expert_intermediate_size=24, shared_expert_gate=True)
    pattern = tiny_config(**SIZES | {"layer_pattern": ["dense", "expert", "expert"], "moe": every})
    assert pattern.layer_kinds == tiny_config(**SIZES | {"moe": EXPERTS}).layer_kinds
