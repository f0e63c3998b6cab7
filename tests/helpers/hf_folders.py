"""Tiny random Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 67
_SIZES: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "use_cache": False,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "router_aux_loss_coef": 0.0}
_GPT2 = {
    "n_layer": 4, "n_embd": 32, "n_head": 4, "vocab_size": VOCABULARY, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "use_cache": False,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _SIZES),
    "tied": ("Qwen3ForCausalLM", _SIZES | {"tie_word_embeddings": True}),
    "experts": ("MixtralForCausalLM", _SIZES | _EXPERTS),
    "gpt2": ("GPT2LMHeadModel", _GPT2),
}


def model_class(name: str) -> Any:
    """Return the class of a model."""
    return getattr(transformers, MODELS[name][0])


def make_folder(name: str, parent: Path) -> Path:
    """Save a model with weights drawn wide, in files of at most 60 KB."""
    own = model_class(name)
    torch.manual_seed(0)
    model = own(own.config_class(**MODELS[name][1]))
    model.save_pretrained(parent / name, max_shard_size="60KB")
    return parent / name
