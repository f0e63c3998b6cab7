"""Tiny random Hugging Face folders of the families that ``GPTModel`` has rules for.

Weights are drawn wide, so that logits deviate by more than 1: flat logits would hide a wrong scale.
Options differ from the defaults wherever a family allows it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCABULARY, LENGTH = 67, 24
_SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 44, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 48,
    "initializer_range": 0.2, "rms_norm_eps": 1e-3, "attention_dropout": 0.0,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "use_cache": False,
}  # fmt: skip
_OF_ALL = ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 0.2,
    "high_freq_factor": 1.5, "original_max_position_embeddings": 8,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 700.0, "factor": 4.0, "beta_fast": 1.0, "beta_slow": 0.05,
    "original_max_position_embeddings": 8, "truncate": False, "attention_factor": 1.3,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 300.0}
_LONG = {
    "rope_type": "longrope", "rope_theta": 300.0, "short_factor": [1.0, 1.1, 1.3, 1.4],
    "long_factor": [1.2, 2.0, 3.5, 5.0], "factor": 6.0, "original_max_position_embeddings": 8,
}  # fmt: skip
_SHARP = {
    "rope_type": "yarn", "rope_theta": 700.0, "factor": 8.0, "beta_fast": 0.3, "beta_slow": 0.02,
    "original_max_position_embeddings": 8, "mscale": 0.7, "mscale_all_dim": 1.5, "truncate": False,
}  # fmt: skip
_GPT2 = {
    "n_layer": 2, "n_embd": 32, "n_head": 4, "n_inner": 44, "n_positions": 48,
    "layer_norm_epsilon": 1e-3, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 9, "kv_lora_rank": 10, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "moe_intermediate_size": 12, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "rms_norm_eps": 1e-6,
}  # fmt: skip
_SIGMOID = {
    "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    "moe_intermediate_size": 12, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.5,
}  # fmt: skip
_TIED, _UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
_WITHOUT_RMS = {"rms_norm_eps": 1e-6}  # a key that the class does not know
_MIXED = {
    "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5,
    "rope_parameters": _ROPE,
}  # fmt: skip
_NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "head_dim": 12,
    "mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2,
    "chunk_size": 8, "time_step_min": 0.05, "layer_norm_epsilon": 1e-3,
    "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 20,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 12, "rope_parameters": _LLAMA3}),
    "llama-tied": ("Llama", _TIED | {"head_dim": 8, "rope_parameters": _YARN}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": _ROPE}),
    "mistral": ("Mistral", {"head_dim": 12, "sliding_window": 5, "rope_parameters": _ROPE}),
    "qwen2": ("Qwen2", _TIED | {"rope_parameters": _ROPE}),
    "qwen2-window": ("Qwen2", {
        "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
        "rope_parameters": _ROPE,
    }),
    "qwen3": ("Qwen3", {"head_dim": 12, "rope_parameters": _ROPE}),
    "phi3": ("Phi3", {
        "sliding_window": 5, "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5},
    }),
    "phi3-long": ("Phi3", {
        "original_max_position_embeddings": 8, "rope_parameters": _LONG,
    }),
    "glm": ("Glm", {
        "head_dim": 12, "attention_bias": True,
        "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5},
    }),
    "glm4": ("Glm4", {
        "head_dim": 8, "attention_bias": False,
        "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5},
    }),
    "cohere": ("Cohere", _WITHOUT_RMS | {
        "layer_norm_eps": 1e-3, "logit_scale": 2.0, "rope_parameters": _ROPE,
    }),
    "cohere2": ("Cohere2", _WITHOUT_RMS | _MIXED | _UNTIED | {
        "layer_norm_eps": 1e-3, "logit_scale": 2.0,
    }),
    "ernie4-5": ("Ernie4_5", _TIED | {
        "head_dim": 12, "use_bias": True, "rope_parameters": _ROPE,
    }),
    "gpt2": ("GPT2", _GPT2),
    "mixtral": ("Mixtral", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7,
        "rope_parameters": _ROPE,
    }),
    "qwen3-moe": ("Qwen3Moe", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
        "mlp_only_layers": [0], "head_dim": 12, "norm_topk_prob": True, "rope_parameters": _ROPE,
    }),
    "qwen2-moe": ("Qwen2Moe", {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28, "decoder_sparse_step": 2, "rope_parameters": _ROPE,
    }),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _ROPE}),
    "deepseek-v2": ("DeepseekV2", _LATENT | {
        "n_routed_experts": 12, "num_experts_per_tok": 4, "topk_method": "group_limited_greedy",
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "rope_parameters": _SHARP,
    }),
    "deepseek-v2-lite": ("DeepseekV2", _LATENT | {
        "n_routed_experts": 4, "num_experts_per_tok": 3, "q_lora_rank": None,
        "rope_parameters": _ROPE,
    }),
    "deepseek-v3": ("DeepseekV3", _LATENT | {
        "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
        "rope_parameters": _SHARP, "num_nextn_predict_layers": 0,
    }),
    "granite": ("Granite", {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 0.7,
        "attention_multiplier": 0.2, "rope_parameters": _ROPE,
    }),
    "olmo2": ("Olmo2", {"rope_parameters": _ROPE}),
    "gemma": ("Gemma", {"head_dim": 12, "rope_parameters": _ROPE}),
    "gemma2": ("Gemma2", _UNTIED | {
        "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 7, "rope_parameters": _ROPE,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
    }),
    "gemma3": ("Gemma3", _UNTIED | {
        "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 7, "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
        },
    }),
    "gpt-oss": ("GptOss", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12, "sliding_window": 5,
        "swiglu_limit": 1.5, "rope_parameters": _YARN,
    }),
    "vaultgemma": ("VaultGemma", _UNTIED | {
        "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 7, "rope_parameters": _ROPE,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
    }),
    "ministral": ("Ministral", _MIXED | {"head_dim": 12}),
    "cwm": ("Cwm", _MIXED | {"head_dim": 12, "bos_token_id": 65, "eos_token_id": 66}),
    "smollm3": ("SmolLM3", _UNTIED | {
        "no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 5,
        "rope_parameters": _ROPE,
    }),
    "olmo3": ("Olmo3", _MIXED | {
        "rope_parameters": {
            "full_attention": _LLAMA3, "sliding_attention": _ROPE,
        },
    }),
    "exaone4": ("Exaone4", _MIXED),
    "seed-oss": ("SeedOss", {"head_dim": 12, "residual_dropout": 0.0, "rope_parameters": _ROPE}),
    "arcee": ("Arcee", {"head_dim": 12, "rope_parameters": _ROPE}),
    "nemotron": ("Nemotron", _WITHOUT_RMS | {
        "norm_eps": 1e-3, "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5},
    }),
    "starcoder2": ("Starcoder2", _WITHOUT_RMS | _UNTIED | {
        "norm_epsilon": 1e-3, "sliding_window": 5, "residual_dropout": 0.0,
        "embedding_dropout": 0.0, "rope_parameters": _ROPE,
    }),
    "granite-moe": ("GraniteMoe", {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 0.7,
        "attention_multiplier": 0.2, "num_local_experts": 4, "rope_parameters": _ROPE,
    }),
    "glm4-moe": ("Glm4Moe", _SIGMOID | {
        "head_dim": 12, "attention_bias": True, "use_qk_norm": True, "num_mtp_layers": 0,
        "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5},
    }),
    "dots1": ("Dots1", _MIXED | _SIGMOID | {"n_shared_experts": 1}),
    "mamba2": ("Mamba2", _UNTIED | {
        "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8,
        "conv_kernel": 3, "time_step_limit": [0.0, 0.9], "layer_norm_epsilon": 1e-3,
    }),
    "nemotron-h": ("NemotronH", _NEMOTRON_H),
    "nemotron-3": ("NemotronH", _NEMOTRON_H | {"moe_latent_size": 12}),
    "qwen3-next": ("Qwen3Next", {
        "layer_types": ["linear_attention", "full_attention"], "head_dim": 12,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 6, "linear_conv_kernel_dim": 3, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": False,
        "shared_expert_intermediate_size": 28, "mlp_only_layers": [1],
        "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5},
    }),
    "kimi-k2": ("DeepseekV3", _LATENT | {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "rope_parameters": _ROPE, "num_nextn_predict_layers": 0,
    }),
}  # fmt: skip


def make_model(name: str, **options: Any) -> Any:
    """Return a model of ``transformers``; norms and biases have values that show, too."""
    family, own = FOLDERS[name]
    config_class, model_class = (
        getattr(transformers, f"{family}{suffix}") for suffix in _suffixes(family)
    )
    torch.manual_seed(0)
    sizes = {k: v for k, v in _SIZES.items() if family != "GPT2" or k in _OF_ALL}
    model = model_class(config_class(**(sizes | own | options)))
    with_softcapping(model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            is_vector = tensor.ndim == 1 or key.endswith("_bias")  # also of every expert
            if is_vector and tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.3)
            if key.endswith("linear_attn.A_log"):  # else states decay to rounding in a token
                tensor.sub_(3)
    return model.eval()


def with_softcapping(model: Any) -> Any:
    """Let a model compute what its configuration says: older versions of ``transformers`` choose
    sdpa for models with softcapping, and sdpa leaves the softcapping out.
    """
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    return model


def _suffixes(family: str) -> tuple[str, str]:
    config = "TextConfig" if family == "Gemma3" else "Config"
    return (config, "LMHeadModel" if family == "GPT2" else "ForCausalLM")


def make_folder(name: str, parent: Path, **options: Any) -> Path:
    """Save a model in files of at most 40 KB."""
    path = parent / name
    make_model(name, **options).save_pretrained(path, max_shard_size="40KB")
    if name == "kimi-k2":  # its class is code in the folder, which is DeepSeek's
        plain = json.loads((path / "config.json").read_text())
        plain |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.C"}}
        (path / "config.json").write_text(json.dumps(plain))
    return path


def make_predicting_folder(parent: Path, name: str = "deepseek-v3") -> Path:
    """Save a family with one layer of multi-token prediction behind its two layers, as the Hub has
    DeepSeek V3 and GLM-4.5.
    """
    path = make_folder(name, parent, num_hidden_layers=3).rename(parent / "predicting")
    tensors: dict[str, torch.Tensor] = {}
    for file in path.glob("model*"):
        tensors |= load_file(file) if file.suffix == ".safetensors" else {}
        file.unlink()
    generator, layer, size = torch.Generator().manual_seed(3), "model.layers.2", 32
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{layer}.{name}.weight"] = 1 + torch.randn(size, generator=generator) * 0.3
    tensors[f"{layer}.eh_proj.weight"] = torch.randn(size, 2 * size, generator=generator) * 0.2
    tensors[f"{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    plain = json.loads((path / "config.json").read_text())
    plain |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(plain))
    return path


def tokens(*shape: int) -> torch.Tensor:
    """Return random tokens."""
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(5))
