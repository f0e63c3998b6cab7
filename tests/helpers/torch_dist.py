"""Recorded checkpoints of Megatron-Core, and folders that say their configurations."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import transformers

from tests.helpers.record_torch_dist import STEP, TARGET, VOCABULARY

_SIZES: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Llama", {"head_dim": 4}),
    "experts": ("Mixtral", {
        "head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 12,
        "tie_word_embeddings": True, "sliding_window": None,
    }),
    "uneven": ("Qwen2Moe", {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 12, "mlp_only_layers": [0], "norm_topk_prob": False,
    }),
    "latent": ("DeepseekV3", {
        "num_key_value_heads": 4, "q_lora_rank": 9, "kv_lora_rank": 10, "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4, "v_head_dim": 8, "moe_intermediate_size": 12, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
    }),
}  # fmt: skip
ITERATION = f"iter_{STEP:07d}"


def unpack(parent: Path) -> None:
    """Unpack every recorded checkpoint into ``parent``."""
    with tarfile.open(TARGET) as archive:
        archive.extractall(parent, filter="data")


def write_config(case: str, path: Path, **changes: Any) -> Path:
    """Write the config.json of a case's model into a folder without weights."""
    family, own = FOLDERS[case]
    config_class: Any = getattr(transformers, f"{family}Config")
    config = config_class(
        **{**_SIZES, **own, **changes}, architectures=[f"{family}ForCausalLM"], dtype=None
    )
    config.save_pretrained(path)
    return path
