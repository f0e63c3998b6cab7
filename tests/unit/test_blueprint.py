"""The blueprint has one row for each parameter of :class:`GPTModel`, in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_lightning.config import LatentAttentionConfig, MoEConfig, TransformerConfig
from megatron_lightning.models import GPTModel, num_parameters
from megatron_lightning.models.blueprint import layer_weights, model_weights

SIZES: dict[str, Any] = {
    "num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2,
    "vocab_size": 101, "max_sequence_length": 32, "ffn_hidden_size": 48,
}  # fmt: skip
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
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen 2": {"add_qkv_bias": True, "kv_channels": 24},
    "Qwen 3": {"qk_layernorm": True},
    "OLMoE": {
        "qk_layernorm": True, "qk_layernorm_per_head": False, "moe": MoEConfig(num_experts=4),
    },
    "GPT-2": GPT2 | {"num_query_groups": None},
    "experts": {"moe": EXPERTS, "mtp_num_layers": 2},
    "experts with biases": GPT2 | {"moe": EXPERTS, "qk_layernorm": True, "mtp_num_layers": 1},
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
    config = TransformerConfig(**SIZES | MODELS[name])
    with torch.device("meta"):
        model = GPTModel(config)
    parameters = {path: tuple(p.shape) for path, p in model.named_parameters()}
    rows = {weight.path: weight.shape for weight in model_weights(config)}
    assert list(rows.items()) == list(parameters.items())
    assert num_parameters(config) == sum(p.numel() for p in model.parameters())
    with pytest.warns(DeprecationWarning, match="models.num_parameters"):
        assert config.num_parameters == num_parameters(config)


def test_a_layer_is_known_by_its_index() -> None:
    config = TransformerConfig(**SIZES | MODELS["experts"])
    dense, expert = ({weight.module for weight in layer_weights(config, index)} for index in (0, 1))
    assert "mlp.linear_fc1" in dense - expert
    assert "mlp.router" in expert - dense
