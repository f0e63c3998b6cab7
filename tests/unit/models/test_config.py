"""The model configuration's own checks, and the rules that span it and a layout."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from megatron_lightning.config import RopeScaling, TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.models import num_parameters
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.rules import check_model_layout

SMALL = TransformerConfig(
    num_layers=4, hidden_size=64, num_attention_heads=8, vocab_size=100, max_sequence_length=32
)
LLAMA3 = RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=8192)
YARN = RopeScaling(rope_type="yarn", factor=40.0, original_max_position_embeddings=4096)
ALL_HEADS = {"qk_layernorm": True, "qk_layernorm_per_head": False}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0; it must be a positive integer"),
        ({"vocab_size": 3.5}, "vocab_size is 3.5"),
        ({"num_query_groups": True}, "num_query_groups is True"),
        ({"normalization": "BatchNorm"}, "normalization is 'BatchNorm'.*RMSNorm, LayerNorm"),
        ({"activation": "relu"}, "activation is 'relu'.*swiglu"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'.*rope"),
        ({"hidden_dropout": 1.0}, "hidden_dropout is 1.0.*below 1"),
        ({"embedding_dropout": -0.1}, "embedding_dropout is -0.1.*below 1"),
        ({"init_method_std": -0.1}, "init_method_std is -0.1.*0 or more"),
        ({"layernorm_epsilon": float("nan")}, "layernorm_epsilon is nan.*0 or more"),
        ({"rotary_base": 0.0}, "rotary_base is 0.0.*above 0"),
        ({"attention_dropout": -0.1}, "attention_dropout is -0.1"),
        (
            {"hidden_size": 60},
            "hidden_size=60 is not divisible by num_attention_heads=8.*kv_channels",
        ),
        ({"num_query_groups": 3}, "num_attention_heads=8 is not divisible by num_query_groups=3"),
        ({"kv_channels": 7}, "kv_channels=7 rotates 7 channels"),
        (
            {"qk_layernorm_per_head": False},
            "qk_layernorm_per_head=False with qk_layernorm=False.*Set qk_layernorm to True",
        ),
        (
            {**ALL_HEADS, "normalization": "LayerNorm"},
            "qk_layernorm=True and normalization=LayerNorm.*normalization to RMSNorm",
        ),
        ({"rotary_percent": 1.5}, "rotary_percent is 1.5"),
        ({"rope_scaling": 8.0}, "rope_scaling is 8.0, which describes no RopeScaling"),
        (
            {"rope_scaling": LLAMA3, "position_embedding_type": "learned_absolute"},
            "rope_scaling is set, and position_embedding_type=learned_absolute.*to rope",
        ),
        (
            {"rope_scaling": YARN, "position_embedding_type": "none"},
            "rope_scaling is set, and position_embedding_type=none",
        ),
        (
            {"rope_scaling": YARN, "rotary_base": 1.0},
            "rotary_base=1.0 with rope_scaling.rope_type=yarn.*Set rotary_base above 1",
        ),
    ],
)
def test_wrong_values_name_value_and_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("scaling", "changes", "message"),
    [
        (LLAMA3, {"rope_type": "dynamic"}, "rope_scaling.rope_type is 'dynamic'.*llama3, yarn"),
        (
            LLAMA3,
            {"original_max_position_embeddings": 0},
            "original_max_position_embeddings is 0; it must be a positive integer",
        ),
        (YARN, {"factor": 0.5}, "rope_scaling.factor is 0.5; low.*Set it to 1 or more"),
        (YARN, {"factor": float("nan")}, "rope_scaling.factor is nan"),
        (
            LLAMA3,
            {"high_freq_factor": 1.0},
            "low_freq_factor is 1.0 and high_freq_factor 1.0.*0 < low_freq_factor < high",
        ),
        (YARN, {"beta_slow": 0.0}, "beta_slow is 0.0 and beta_fast 32.0.*0 < beta_slow < beta"),
        (
            LLAMA3,
            {"mscale": 0.7},
            "rope_scaling.mscale=0.7 is an option of yarn, and rope_type is llama3.*to yarn",
        ),
        (
            YARN,
            {"low_freq_factor": 2.0},
            "low_freq_factor=2.0 is an option of llama3, and rope_type is yarn",
        ),
        (YARN, {"mscale": -1.0}, "rope_scaling.mscale is -1.0.*Set it to 0 or more"),
        (YARN, {"mscale_all_dim": float("inf")}, "rope_scaling.mscale_all_dim is inf"),
    ],
)
def test_wrong_rope_scaling_names_value_and_fix(
    scaling: RopeScaling, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(scaling, **changes)


@pytest.mark.parametrize("scaling", [LLAMA3, YARN, replace(YARN, mscale=0.7)], ids=str)
def test_rope_scaling_is_saved_as_plain_values(scaling: RopeScaling) -> None:
    config = replace(SMALL, rope_scaling=scaling)
    plain = json.loads(json.dumps(config.to_dict()))
    assert TransformerConfig(**plain) == config
    assert num_parameters(config) == num_parameters(SMALL)


def test_derived_sizes() -> None:
    config = replace(SMALL, num_query_groups=2, kv_channels=16)
    assert (config.head_dim, config.query_groups, config.heads_per_group, config.ffn_size) == (
        16,
        2,
        4,
        256,
    )
    assert config.qkv_rows == (8 + 2 + 2) * 16
    assert SMALL.query_groups == 8
    assert TransformerConfig(**config.to_dict()) == config


def tensor(size: int, **options: Any) -> ParallelLayout:
    return ParallelLayout(tensor_model_parallel_size=size, **options)


@pytest.mark.parametrize(
    ("changes", "layout", "world", "message"),
    [
        ({}, tensor(2), 3, "3 ranks cannot be divided.*2 ranks"),
        (
            {"num_attention_heads": 6, "kv_channels": 8},
            tensor(4),
            4,
            "num_attention_heads=6.*tensor_model_parallel_size=4",
        ),
        ({"ffn_hidden_size": 90}, tensor(4), 4, "ffn_hidden_size=90.*multiple of 4"),
        ({"num_query_groups": 2}, tensor(4), 4, None),
        (
            {
                "num_query_groups": 8,
                "num_attention_heads": 24,
                "kv_channels": 8,
                "ffn_hidden_size": 96,
            },
            tensor(12),
            12,
            "num_query_groups=8 and tensor_model_parallel_size=12: neither.*divisor or a multiple "
            "of 8",
        ),
        ({"num_query_groups": 1, "kv_channels": 2}, tensor(8), 8, "the 20 rows.*multiple of 8"),
        (
            {"vocab_size": 9},
            tensor(8),
            8,
            "vocab_size=9 leaves a rank without a row.*tensor_model_parallel_size=8",
        ),
        (
            {"max_sequence_length": 16},
            tensor(1),
            1,
            "24 tokens are longer than.*max_sequence_length=16",
        ),
        ({}, tensor(8, sequence_parallel=True), 8, None),
        (
            {},
            ParallelLayout(pipeline_model_parallel_size=8),
            8,
            "num_layers=4 are fewer than the 8 pipeline stages",
        ),
        (
            {},
            ParallelLayout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=3),
            2,
            r"num_layers=4 are fewer than the 6 pipeline stages.*=2 x .*=3\)",
        ),
        ({}, ParallelLayout(expert_model_parallel_size=2), 2, "expert_model_parallel_size=2"),
        ({}, ParallelLayout(expert_tensor_parallel_size=2), 2, "=2 .* has no experts. Leave it"),
    ],
)
def test_model_and_layout(
    changes: dict[str, Any], layout: ParallelLayout, world: int, message: str | None
) -> None:
    config = replace(SMALL, **changes)
    if message is None:
        check_model_layout(config, layout, world, sequence_length=24)
        return
    with pytest.raises(ConfigError, match=message):
        check_model_layout(config, layout, world, sequence_length=24)


def test_a_sequence_that_the_ranks_cannot_share() -> None:
    with pytest.raises(
        ConfigError, match=r"samples of 27 tokens.*tensor_model_parallel_size=2.*multiple of 2"
    ):
        check_model_layout(SMALL, tensor(2), 2, sequence_length=27)
    check_model_layout(SMALL, tensor(2, sequence_parallel=False), 2, sequence_length=27)
