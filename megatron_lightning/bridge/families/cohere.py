"""Cohere's Command models: attention and feed-forward side by side behind one LayerNorm without
bias, neighboring channels rotated in pairs, scaled logits. Command A and R7B rotate in windows
alone.
"""

from dataclasses import dataclass
from typing import Any

from megatron_lightning.bridge.families.llama import SIZES, WEIGHTS
from megatron_lightning.bridge.family_rules.family import Family
from megatron_lightning.bridge.family_rules.position_settings import Rope, RotatedWindows, Window
from megatron_lightning.bridge.family_rules.settings import (
    Choice,
    Constant,
    Row,
    Same,
    Settings,
    Values,
)


@dataclass(frozen=True)
class LogitScale(Row):
    """Factor of the logits, whose inverse is ours."""

    def read(self, theirs: Settings) -> Values:
        """Return the field of ``TransformerConfig``."""
        return {"logits_scaling": 1.0 / float(theirs["logit_scale"])}

    def write(self, ours: Values) -> Values:
        """Return the key."""
        return {"logit_scale": 1.0 / ours["logits_scaling"]}


SETTINGS: tuple[Any, ...] = (
    *SIZES, Same("layernorm_epsilon", "layer_norm_eps"), Rope(), LogitScale(),
    Choice("activation", "hidden_act", {"swiglu": "silu"}),
    Constant("rotary_interleaved", True), Constant("normalization", "LayerNorm"),
    Constant("layernorm_bias", False),
    Constant("norm_placement", "parallel", {"attention_bias": False}),
)  # fmt: skip


class Cohere(Family):
    """Family of ``CohereForCausalLM``, Command R and Aya."""

    architecture = "CohereForCausalLM"
    settings = (*SETTINGS, Constant("add_bias_linear", False, {"use_qk_norm": False}))
    weights = WEIGHTS


class Cohere2(Family):
    """Family of ``Cohere2ForCausalLM``, Command R7B and Command A."""

    architecture = "Cohere2ForCausalLM"
    settings = (
        *SETTINGS, Same("kv_channels", "head_dim"), Window(by_layer=True), RotatedWindows(),
    )  # fmt: skip
    weights = WEIGHTS
