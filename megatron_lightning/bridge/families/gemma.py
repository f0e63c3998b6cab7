"""Gemma: gated gelu, zero-centered norms, and word embeddings times the root of their width."""

from typing import Any

from megatron_lightning.bridge.families.llama import SETTINGS, WEIGHTS
from megatron_lightning.bridge.rules import Family
from megatron_lightning.bridge.settings import Choice, Constant, RootOfWidth, Rope, Same

GEMMA: tuple[Any, ...] = (
    *SETTINGS[:-1], Same("kv_channels", "head_dim"), RootOfWidth(),
    Constant("layernorm_zero_centered_gamma", True),
)  # fmt: skip


class Gemma(Family):
    """``GemmaForCausalLM``."""

    architecture = "GemmaForCausalLM"
    settings = (
        *GEMMA, Rope(), Choice("activation", "hidden_act", {"geglu_tanh": "gelu_pytorch_tanh"})
    )  # fmt: skip
    weights = WEIGHTS
