"""Qwen3-Next: gated delta net in most layers, attention with gates, experts with a gated shared
expert. Its layers of multi-token prediction, unread by ``transformers``, are carried from folder to
folder.
"""

from typing import Any

from megatron_lightning.bridge.families.llama import OURS, SETTINGS, THEIRS, WEIGHTS
from megatron_lightning.bridge.families.qwen import HEAD_NORMS
from megatron_lightning.bridge.families.qwen_moe import (
    EXPERTS,
    GATED_EXPERT,
    GATED_WEIGHTS,
    HEAD_DIM,
    TOPK,
    WIDTH,
)
from megatron_lightning.bridge.family_rules.family import Family, table
from megatron_lightning.bridge.family_rules.linear_settings import LinearLayers
from megatron_lightning.bridge.family_rules.position_settings import Rope
from megatron_lightning.bridge.family_rules.settings import Constant, Same
from megatron_lightning.bridge.tensors.tensor_ops import DeltaNetRows

SIZES: tuple[Any, ...] = tuple(
    Same(f"delta_net.{name}", f"linear_{name}")
    for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim",
                 "conv_kernel_dim")
)  # fmt: skip
MIXER, THEIR_MIXER = f"{OURS}.self_attention", f"{THEIRS}.linear_attn"
NAMES = ("A_log", "dt_bias", "conv1d.weight", "out_proj.weight")


class Qwen3Next(Family):
    """Family of ``Qwen3NextForCausalLM``."""

    architecture = "Qwen3NextForCausalLM"
    settings = (
        *SETTINGS, Rope(partial=True), HEAD_DIM, *TOPK, WIDTH, *GATED_EXPERT, LinearLayers(),
        *SIZES, Constant("qk_layernorm", True, {"attention_bias": False}),
        Constant("layernorm_zero_centered_gamma", True), Constant("attention_output_gate", True),
    )  # fmt: skip
    weights = table(WEIGHTS, HEAD_NORMS, EXPERTS, GATED_WEIGHTS, {
        f"{MIXER}.in_proj.weight": (
            DeltaNetRows(), *(f"{THEIR_MIXER}.in_proj_{x}.weight" for x in ("qkvz", "ba"))
        ),
        f"{MIXER}.out_norm.weight": f"{THEIR_MIXER}.norm.weight",
        **{f"{MIXER}.{name}": f"{THEIR_MIXER}.{name}" for name in NAMES},
    })  # fmt: skip
