"""A plan predicts the bytes that an uncompiled layer keeps for backward on a CPU, to the byte."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from megatron_lightning.config import (
    DeltaNetConfig,
    MambaConfig,
    RecomputeOptions,
    TransformerConfig,
)
from megatron_lightning.models import GPTModel
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.planning.ledger.activation_memory import stage_profile
from megatron_lightning.planning.ledger.layer_tapes import Sizes
from megatron_lightning.planning.ledger.precision_bytes import precision_of
from tests.helpers.kept_bytes import kept_bytes
from tests.helpers.layouts import tiny_config

SEQUENCE, HEADS = 32, 4
BATCHES, HEAD_DIMS = (1, 2, 4), (16, 32, 64, 128)
DELTA = DeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=6)
MODELS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "norms of heads": {"qk_layernorm": True},
    "gates": {"attention_output_gate": True},
    "gates, norms of heads, a group a head": {
        "attention_output_gate": True, "qk_layernorm": True, "num_query_groups": None,
    },
    "gates, learned positions": {
        "attention_output_gate": True, "position_embedding_type": "learned_absolute",
    },
    "one group a head": {"num_query_groups": None},
    "learned positions": {"position_embedding_type": "learned_absolute"},
    "normed heads, learned positions": {
        "qk_layernorm": True, "position_embedding_type": "learned_absolute",
    },
    "windows": {"window_size": (8, 0)},
    "windows of other layers": {"window_size": (8, 0), "window_attn_skip_freq": 2},
    "zero-centered norms": {"layernorm_zero_centered_gamma": True, "qk_layernorm": True},
    "a gated gelu": {"activation": "geglu_tanh"},
    "limits": {
        "activation": "quick_geglu", "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0,
    },
    "squared": {"activation": "squared_relu"},
    "capped scores": {"attn_logit_softcapping": 3.0},
    "sinks": {"softmax_type": "learnable"},
    "multipliers": {"residual_multiplier": 0.4, "softmax_scale": 0.2},
    "Mamba-2": {
        "layer_pattern": ["mamba"] * 2, "mamba": MambaConfig(num_groups=2, head_dim=16),
    },
    "Mamba-2, not recomputed": {
        "layer_pattern": ["mamba"] * 2,
        "mamba": MambaConfig(num_groups=2, head_dim=16, chunk_size=8, recompute_scan=False),
    },
    "norms behind": {"norm_placement": "post"},
    "norms before and behind": {"norm_placement": "sandwich"},
    "one norm before both": {"norm_placement": "parallel", "normalization": "LayerNorm"},
    "windows, learned positions": {
        "window_size": (8, 0), "position_embedding_type": "learned_absolute",
    },
    "gated delta net": {"delta_net": DELTA, "linear_attention_freq": [0, 1]},
    "gated delta net by pattern": {"delta_net": DELTA, "layer_pattern": ["dense", "delta_net"]},
}  # fmt: skip


def planned_bytes(config: TransformerConfig, batch: int) -> float:
    """Return the same by the plan."""
    sizes = Sizes(
        config=config, layout=ParallelLayout(), precision=precision_of("32-true"), device="cpu",
        sequence_length=SEQUENCE, micro_batch_size=batch, split_backward=False,
    )  # fmt: skip
    return stage_profile(sizes, ["decoder.layers.1"], RecomputeOptions()).kept


def model(head_dim: int, options: dict[str, Any]) -> TransformerConfig:
    """Return a model of two layers."""
    base = {"num_layers": 2, "num_attention_heads": HEADS, "num_query_groups": 2, "vocab_size": 64}
    sizes = {"hidden_size": HEADS * head_dim, "max_sequence_length": SEQUENCE}
    return tiny_config(**base | sizes | options)


@pytest.mark.spread(8)
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_keeps_what_is_planned(name: str) -> None:
    for batch, head_dim in product(BATCHES, HEAD_DIMS):
        config = model(head_dim, MODELS[name])
        layer = GPTModel(config).decoder.layers["1"]
        kept = kept_bytes(layer, batch=batch, sequence=SEQUENCE)
        assert planned_bytes(config, batch) == kept, (batch, head_dim)
