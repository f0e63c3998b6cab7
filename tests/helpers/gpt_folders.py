"""Tiny random Hugging Face folders of the families that ``GPTModel`` has rules for.

Weights are drawn wide, so that logits deviate by more than 1: flat logits would hide a wrong scale.
Options differ from the defaults wherever a family allows it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY, LENGTH = 67, 24
_SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 44, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 48,
    "initializer_range": 0.2, "rms_norm_eps": 1e-3, "attention_dropout": 0.0,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "use_cache": False,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 0.2,
    "high_freq_factor": 1.5, "original_max_position_embeddings": 8,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 700.0, "factor": 4.0, "beta_fast": 1.0, "beta_slow": 0.05,
    "original_max_position_embeddings": 8, "truncate": False, "attention_factor": 1.3,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 300.0}
_TIED = {"tie_word_embeddings": True}
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 12, "rope_parameters": _LLAMA3}),
    "llama-tied": ("Llama", _TIED | {"head_dim": 8, "rope_parameters": _YARN}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": _ROPE}),
    "mistral": ("Mistral", {"head_dim": 12, "sliding_window": 5, "rope_parameters": _ROPE}),
    "qwen2": ("Qwen2", _TIED | {"rope_parameters": _ROPE}),
    "qwen2-window": ("Qwen2", {
        "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0,
        "rope_parameters": _ROPE,
    }),
    "qwen3": ("Qwen3", {"head_dim": 12, "rope_parameters": _ROPE}),
}  # fmt: skip


def make_model(name: str, **options: Any) -> Any:
    """Return a model of ``transformers``; norms and biases have values that show, too."""
    family, own = FOLDERS[name]
    config_class, model_class = (
        getattr(transformers, f"{family}{suffix}") for suffix in _suffixes(family)
    )
    torch.manual_seed(0)
    model = model_class(config_class(**(_sizes(family) | own | options)))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.ndim == 1 and tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.3)
            del key
    return model.eval()


def _suffixes(family: str) -> tuple[str, str]:
    return ("Config", "LMHeadModel" if family == "GPT2" else "ForCausalLM")


def _sizes(family: str) -> dict[str, Any]:
    return _SIZES


def make_folder(name: str, parent: Path, **options: Any) -> Path:
    """Save a model in files of at most 40 KB."""
    make_model(name, **options).save_pretrained(parent / name, max_shard_size="40KB")
    return parent / name


def tokens(*shape: int) -> torch.Tensor:
    """Return random tokens."""
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(5))
