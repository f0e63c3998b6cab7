"""Gemma 1 to 3: gated gelu, zero-centered norms, word embeddings times the root of their width."""

from collections.abc import Mapping
from typing import Any

from megatron_lightning.bridge.families.llama import EPSILON, OURS, SIZES, THEIRS, WEIGHTS
from megatron_lightning.bridge.families.qwen import HEAD_NORMS
from megatron_lightning.bridge.family_rules.family import Family, table
from megatron_lightning.bridge.family_rules.position_settings import Rope, Window
from megatron_lightning.bridge.family_rules.settings import (  # fmt: skip
    Choice,
    Constant,
    InverseRoot,
    RootOfWidth,
    Same,
)

GEMMA: tuple[Any, ...] = (
    *SIZES, EPSILON, Same("kv_channels", "head_dim"), RootOfWidth(),
    Constant("layernorm_zero_centered_gamma", True),
)  # fmt: skip
CAPPED: tuple[Any, ...] = (
    *GEMMA, Window(by_layer=True), InverseRoot("softmax_scale", "query_pre_attn_scalar"),
    Same("final_logit_softcapping", none=None),
    Choice("activation", "hidden_activation", {"geglu_tanh": "gelu_pytorch_tanh"}),
)  # fmt: skip
SANDWICH = (*CAPPED, Constant("norm_placement", "sandwich"))
PRE_MLP = f"{THEIRS}.pre_feedforward_layernorm.weight"
NORMS: Mapping[str, str] = {
    f"{OURS}.{ours}_layernorm.weight": f"{THEIRS}.{theirs}_layernorm.weight"
    for ours, theirs in (
        ("post_self_attn", "post_attention"), ("pre_mlp", "pre_feedforward"),
        ("post_mlp", "post_feedforward"),
    )
}  # fmt: skip


class Gemma(Family):
    """Family of ``GemmaForCausalLM``."""

    architecture = "GemmaForCausalLM"
    settings = (
        *GEMMA, Rope(), Choice("activation", "hidden_act", {"geglu_tanh": "gelu_pytorch_tanh"})
    )  # fmt: skip
    weights = WEIGHTS


class Gemma2(Family):
    """Family of ``Gemma2ForCausalLM``."""

    architecture = "Gemma2ForCausalLM"
    settings = (*SANDWICH, Rope(), Same("attn_logit_softcapping", none=None))
    weights = table(WEIGHTS, NORMS)


class VaultGemma(Family):
    """Family of ``VaultGemmaForCausalLM``: Gemma 2 without norms of outputs."""

    architecture = "VaultGemmaForCausalLM"
    settings = (*CAPPED, Rope(), Same("attn_logit_softcapping", none=None))
    weights = table(WEIGHTS, {"decoder.layers.*.pre_mlp_layernorm.weight": PRE_MLP})


class Gemma3(Family):
    """Family of ``Gemma3ForCausalLM``, text alone. The class reads no cap of scores."""

    architecture = "Gemma3ForCausalLM"
    settings = (
        *SANDWICH, Rope(by_window=True), Constant("qk_layernorm", True),
        Constant("attn_logit_softcapping", None, {"attn_logit_softcapping": None}),
    )  # fmt: skip
    weights = table(WEIGHTS, NORMS, HEAD_NORMS)
