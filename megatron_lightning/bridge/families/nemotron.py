"""Nemotron and Arcee: squared ReLU without a gate; Nemotron with zero-centered LayerNorms."""

from collections.abc import Mapping

from megatron_lightning.bridge.families.llama import EPSILON, OURS, SIZES, THEIRS, WEIGHTS
from megatron_lightning.bridge.family_rules.family import Family, table
from megatron_lightning.bridge.family_rules.position_settings import Rope
from megatron_lightning.bridge.family_rules.settings import Biases, Choice, Constant, Same

SQUARED = (
    *SIZES, Same("kv_channels", "head_dim"), Biases(("attention_bias", "mlp_bias")),
    Choice("activation", "hidden_act", {"squared_relu": "relu2"}),
)  # fmt: skip
UP: Mapping[str, str] = {f"{OURS}.mlp.linear_fc1.*": f"{THEIRS}.mlp.up_proj.*"}


class Arcee(Family):
    """Family of ``ArceeForCausalLM``."""

    architecture = "ArceeForCausalLM"
    settings = (*SQUARED, EPSILON, Rope())
    weights = table(WEIGHTS, UP)


class Nemotron(Family):
    """Family of ``NemotronForCausalLM``."""

    architecture = "NemotronForCausalLM"
    settings = (
        *SQUARED, Same("layernorm_epsilon", "norm_eps"), Rope(partial=True),
        Constant("normalization", "LayerNorm"), Constant("layernorm_zero_centered_gamma", True),
    )  # fmt: skip
    weights = table(WEIGHTS, UP, {
        f"{OURS}.input_layernorm.*": f"{THEIRS}.input_layernorm.*",
        f"{OURS}.pre_mlp_layernorm.*": f"{THEIRS}.post_attention_layernorm.*",
        "decoder.final_layernorm.*": "model.norm.*",
    })  # fmt: skip
