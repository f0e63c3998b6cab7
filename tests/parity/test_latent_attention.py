"""Latent attention: the models of DeepSeek in ``transformers``, and training on every layout against
one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.config import (
    LatentAttentionConfig,
    MoEConfig,
    RopeScaling,
    TransformerConfig,
)
from megatron_lightning.models import GPTModel

transformers = pytest.importorskip("transformers")

Weights = dict[str, Tensor]
VOCABULARY = 67
SIZES = {
    "num_layers": 3,
    "hidden_size": 40,
    "num_attention_heads": 8,
    "vocab_size": VOCABULARY,
    "max_sequence_length": 24,
    "ffn_hidden_size": 44,
    "layernorm_epsilon": 1e-6,  # their norms of latents know no other
    "qk_layernorm": True,
}
HF_SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 40,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 24,
    "intermediate_size": 44,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "pad_token_id": None,
    "attn_implementation": "sdpa",
}
YARN = RopeScaling(
    rope_type="yarn", factor=8.0, original_max_position_embeddings=8, beta_fast=1.0, beta_slow=0.05
)
SHARP = RopeScaling(**(asdict(YARN) | {"mscale": 0.7, "mscale_all_dim": 1.5}))
MODULES = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    "self_attention.linear_proj": "self_attn.o_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc2": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.shared_experts.linear_fc2": "mlp.shared_experts.down_proj",
}


def from_deepseek(hf: Weights, config: TransformerConfig) -> Weights:
    """Map the names; works on weights and on their gradients."""
    ours = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": hf["lm_head.weight"],
    }
    for i, kind in enumerate(config.layer_kinds):
        theirs, layer = f"model.layers.{i}", f"decoder.layers.{i}"
        for name, other in MODULES.items():
            if f"{theirs}.{other}.weight" in hf:
                ours[f"{layer}.{name}.weight"] = hf[f"{theirs}.{other}.weight"]
        for mlp in ("mlp", "mlp.shared_experts") if kind == "expert" else ("mlp",):
            gate_up = [hf.get(f"{theirs}.{mlp}.{x}_proj.weight") for x in ("gate", "up")]
            if gate_up[0] is not None:
                ours[f"{layer}.{mlp}.linear_fc1.weight"] = torch.cat(gate_up)
        if kind == "expert":
            experts = f"{theirs}.mlp.experts"
            ours[f"{layer}.mlp.experts.linear_fc1.weight"] = hf[f"{experts}.gate_up_proj"]
            ours[f"{layer}.mlp.experts.linear_fc2.weight"] = hf[f"{experts}.down_proj"]
        bias = hf.get(f"{theirs}.mlp.gate.e_score_correction_bias")
        if bias is not None:
            ours[f"{layer}.mlp.router.expert_bias"] = bias
    return ours


def deepseek(
    version: str, q_lora_rank: int | None, scaling: RopeScaling | None = None, **experts: Any
) -> tuple[nn.Module, TransformerConfig]:
    """Return a model of ``transformers`` whose layers are dense, or but the first have experts."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0}
    if scaling is not None:
        rope |= asdict(scaling)
        rope["truncate"] = rope.pop("correction_range_round_to_int")
    theirs: dict[str, Any] = {"q_lora_rank": q_lora_rank, "rope_parameters": rope}
    moe = None
    if experts:
        moe = MoEConfig(
            num_experts=8, ffn_hidden_size=12, shared_expert_intermediate_size=24,
            layer_freq=(0, 1, 1), **experts,
        )  # fmt: skip
        theirs |= {
            "num_experts_per_tok": moe.router_topk,
            "routed_scaling_factor": moe.router_topk_scaling_factor,
            "n_group": moe.router_num_groups,
            "topk_group": moe.router_group_topk,
        }
    theirs["first_k_dense_replace"] = 3 if moe is None else 1
    if version == "V2" and moe is not None and moe.router_num_groups:
        theirs["topk_method"] = "group_limited_greedy"
    options = getattr(transformers, f"Deepseek{version}Config")(**HF_SIZES, **theirs)
    model = getattr(transformers, f"Deepseek{version}ForCausalLM")(options)
    config = TransformerConfig(
        **SIZES,
        rotary_base=500.0,
        rope_scaling=scaling,
        mla=LatentAttentionConfig(
            q_lora_rank=q_lora_rank,
            kv_lora_rank=10,
            qk_head_dim=6,
            qk_pos_emb_head_dim=4,
            v_head_dim=8,
        ),
        moe=moe,
    )  # type: ignore[arg-type]
    return model, config


V2_EXPERTS = {
    "router_topk": 2,
    "router_pre_softmax": True,
    "router_topk_scaling_factor": 1.5,
}
V3_EXPERTS = {
    "router_topk": 4,
    "router_score_function": "sigmoid",
    "router_num_groups": 4,
    "router_group_topk": 2,
    "router_topk_scaling_factor": 2.5,
    "router_enable_expert_bias": True,
    "router_load_balancing_type": "none",
}
GROUPS = {"router_num_groups": 4, "router_group_topk": 2}
FAMILIES: dict[str, Callable[[], tuple[nn.Module, TransformerConfig]]] = {
    "v2-lite": lambda: deepseek("V2", None),
    "v2": lambda: deepseek("V2", 9, YARN),
    "v2-sharp": lambda: deepseek("V2", 9, SHARP),
    "v3": lambda: deepseek("V3", 9),
    "v3-lite": lambda: deepseek("V3", None, YARN),
    "v3-sharp": lambda: deepseek("V3", 9, SHARP),
    "v2-experts": lambda: deepseek("V2", 9, SHARP, **V2_EXPERTS),
    "v2-groups": lambda: deepseek("V2", 9, SHARP, **V2_EXPERTS, **GROUPS),
    "v3-experts": lambda: deepseek("V3", 9, SHARP, **V3_EXPERTS),
}


def perturb(model: nn.Module) -> None:
    """Give every parameter and bias a value that shows whether it is used."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_gradients_equal_hugging_face(family: str) -> None:
    torch.manual_seed(0)
    theirs, config = FAMILIES[family]()
    theirs.eval()
    perturb(theirs)
    ours = GPTModel(config)
    ours.load_state_dict(from_deepseek(theirs.state_dict(), config))
    tokens = torch.randint(VOCABULARY, (3, 17))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    hf_logits = theirs(inputs, use_cache=False).logits
    # Both compute in fp32 and differ in the order of sums only: logits are of order 1, so 1e-5 is
    # some 80 roundings.
    torch.testing.assert_close(ours(inputs), hf_logits, rtol=1e-5, atol=1e-5)
    hf_loss = F.cross_entropy(hf_logits.flatten(0, 1), labels.flatten())
    loss = ours(inputs, labels=labels).mean()
    torch.testing.assert_close(loss, hf_loss, rtol=1e-6, atol=1e-6)
    loss.backward()
    hf_loss.backward()
    expected = from_deepseek(
        {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}, config
    )
    actual = {name: p.grad for name, p in ours.named_parameters()}
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        error = (actual[name] - grad).norm() / grad.norm()
        print(f"{name} {float(error):.1e}")
        assert error < 1e-5, f"{name}: relative error {error}"
