"""GLM-4 and Ernie 4.5, which rotate neighboring channels in pairs. GLM-4.5 (GLM-4 with experts) and
dots.llm1: DeepSeek V3's experts behind grouped heads.
"""

from collections.abc import Mapping
from typing import Any

from megatron_lightning.bridge.families import latent
from megatron_lightning.bridge.families.deepseek import EXPERT_BIAS, MOE
from megatron_lightning.bridge.families.llama import OURS, SETTINGS, THEIRS, WEIGHTS
from megatron_lightning.bridge.families.qwen import HEAD_NORMS
from megatron_lightning.bridge.families.qwen_moe import EXPERTS
from megatron_lightning.bridge.family_rules import expert_settings as rows
from megatron_lightning.bridge.family_rules.family import Family, table
from megatron_lightning.bridge.family_rules.position_settings import Rope, Window
from megatron_lightning.bridge.family_rules.settings import Biases, Constant, Same

SIGMOID: tuple[Any, ...] = (
    *SETTINGS, Same("kv_channels", "head_dim"), *MOE, rows.Groups(2), rows.NormalizedScores(),
    Constant("moe.router_enable_expert_bias", True),
    Constant("moe.router_score_function", "sigmoid"),
    Constant("moe.router_load_balancing_type", "none"),
)  # fmt: skip
TABLE = table(WEIGHTS, HEAD_NORMS, latent.SHARED_WEIGHTS, EXPERTS, EXPERT_BIAS)


class Glm4Moe(Family):
    """Family of ``Glm4MoeForCausalLM``, GLM-4.5 and 4.6."""

    architecture = "Glm4MoeForCausalLM"
    settings = (
        *SIGMOID, Rope(partial=True), Same("add_qkv_bias", "attention_bias"),
        Same("qk_layernorm", "use_qk_norm"),
        Same("mtp_num_layers", "num_nextn_predict_layers", none=0),
    )  # fmt: skip
    weights = table(TABLE, latent.MTP_WEIGHTS)
    copies = latent.MTP_COPIES


class Dots1(Family):
    """Family of ``Dots1ForCausalLM``."""

    architecture = "Dots1ForCausalLM"
    settings = (*SIGMOID, Rope(), Window(by_layer=True), Constant("qk_layernorm", True))
    weights = TABLE


_PAIRS = Constant("rotary_interleaved", True)
_GLM = (
    *SETTINGS, _PAIRS, Rope(partial=True), Same("kv_channels", "head_dim"),
    Same("add_qkv_bias", "attention_bias"),
)  # fmt: skip
_FUSED: Mapping[str, str] = {f"{OURS}.mlp.linear_fc1.*": f"{THEIRS}.mlp.gate_up_proj.*"}


class Glm(Family):
    """Family of ``GlmForCausalLM``, GLM-4 of 2024."""

    architecture = "GlmForCausalLM"
    settings = _GLM
    weights = table(WEIGHTS, _FUSED)


class Glm4(Family):
    """Family of ``Glm4ForCausalLM``, GLM-4 of 2025: norms of inputs and outputs."""

    architecture = "Glm4ForCausalLM"
    settings = (*_GLM, Constant("norm_placement", "sandwich"))
    weights = table(
        WEIGHTS,
        _FUSED,
        {
            f"{OURS}.{name}.weight": f"{THEIRS}.{name}.weight"
            for name in ("post_self_attn_layernorm", "post_mlp_layernorm")
        },
    )


class Ernie4_5(Family):
    """Family of ``Ernie4_5ForCausalLM``."""

    architecture = "Ernie4_5ForCausalLM"
    settings = (
        *SETTINGS, _PAIRS, Rope(), Same("kv_channels", "head_dim"), Biases(("use_bias",)),
    )  # fmt: skip
    weights = WEIGHTS
