"""Weights of ``transformers`` models under the names and in the layout of ``GPTModel``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_lightning.config import TransformerConfig

Weights = dict[str, Tensor]


def fuse_qkv(q: Tensor, k: Tensor, v: Tensor, config: TransformerConfig) -> Tensor:
    """Interleave the rows (or biases) of separate projections per query group."""
    g, d = config.query_groups, config.head_dim
    parts = [x.reshape(g, -1, d, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 2)


def from_llama(hf: Weights, config: TransformerConfig) -> Weights:
    """Map the names of Llama, Qwen2, Qwen3, Mixtral, Qwen3-MoE and OLMoE; works on weights and on
    their gradients.
    """
    ours = {"embedding.word_embeddings.weight": hf["model.embed_tokens.weight"]}
    ours["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
    if not config.share_embeddings_and_output_weights:
        ours["output_layer.weight"] = hf["lm_head.weight"]
    for i in range(config.num_layers):
        theirs, layer = f"model.layers.{i}", f"decoder.layers.{i}"
        for kind in ("weight", "bias"):
            qkv = [hf.get(f"{theirs}.self_attn.{x}_proj.{kind}") for x in "qkv"]
            if qkv[0] is not None:
                ours[f"{layer}.self_attention.linear_qkv.{kind}"] = fuse_qkv(*qkv, config)
        for x in "qk":
            if f"{theirs}.self_attn.{x}_norm.weight" in hf:
                ours[f"{layer}.self_attention.{x}_layernorm.weight"] = hf[
                    f"{theirs}.self_attn.{x}_norm.weight"
                ]
        ours |= {
            f"{layer}.input_layernorm.weight": hf[f"{theirs}.input_layernorm.weight"],
            f"{layer}.self_attention.linear_proj.weight": hf[f"{theirs}.self_attn.o_proj.weight"],
            f"{layer}.pre_mlp_layernorm.weight": hf[f"{theirs}.post_attention_layernorm.weight"],
        }
        ours |= {f"{layer}.mlp.{name}": x for name, x in _feed_forward(hf, f"{theirs}.mlp").items()}
    return ours


def _feed_forward(hf: Weights, path: str) -> Weights:
    """Map a dense layer, or one of experts, whose stacked weights have gates first as ours."""
    if f"{path}.gate.weight" in hf:
        return {
            "router.weight": hf[f"{path}.gate.weight"],
            "experts.linear_fc1.weight": hf[f"{path}.experts.gate_up_proj"],
            "experts.linear_fc2.weight": hf[f"{path}.experts.down_proj"],
        }
    gate_up = [hf[f"{path}.{x}_proj.weight"] for x in ("gate", "up")]
    return {
        "linear_fc1.weight": torch.cat(gate_up),
        "linear_fc2.weight": hf[f"{path}.down_proj.weight"],
    }


def from_gpt2(hf: Weights, config: TransformerConfig) -> Weights:
    """Map GPT-2's names; its Conv1D weights are stored transposed."""
    ours = {
        "embedding.word_embeddings.weight": hf["transformer.wte.weight"],
        "embedding.position_embeddings.weight": hf["transformer.wpe.weight"],
    }
    modules = {
        "input_layernorm": "ln_1",
        "self_attention.linear_qkv": "attn.c_attn",
        "self_attention.linear_proj": "attn.c_proj",
        "pre_mlp_layernorm": "ln_2",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    }
    for kind in ("weight", "bias"):
        ours[f"decoder.final_layernorm.{kind}"] = hf[f"transformer.ln_f.{kind}"]
        for i in range(config.num_layers):
            for mine, theirs in modules.items():
                value = hf[f"transformer.h.{i}.{theirs}.{kind}"]
                value = value.t() if value.ndim == 2 else value
                if mine.endswith("linear_qkv"):
                    value = fuse_qkv(*value.chunk(3), config)
                ours[f"decoder.layers.{i}.{mine}.{kind}"] = value
    return ours


def perturb(model: nn.Module) -> None:
    """Give every parameter (norms and biases, too) a value that shows whether it is used."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
