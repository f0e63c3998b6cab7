"""OLMo 2 and 3: Llama with norms behind attention and feed-forward, and of all heads together."""

from collections.abc import Mapping

from megatron_lightning.bridge.families.llama import OURS, SETTINGS, THEIRS, WEIGHTS
from megatron_lightning.bridge.families.qwen import HEAD_NORMS
from megatron_lightning.bridge.family_rules.family import Family, table
from megatron_lightning.bridge.family_rules.position_settings import Rope, Window
from megatron_lightning.bridge.family_rules.settings import Constant

POST = (*SETTINGS, Constant("norm_placement", "post"), Constant("qk_layernorm", True))
NORMS: Mapping[str, str] = {
    f"{OURS}.post_self_attn_layernorm.weight": f"{THEIRS}.post_attention_layernorm.weight",
    f"{OURS}.post_mlp_layernorm.weight": f"{THEIRS}.post_feedforward_layernorm.weight",
}


class Olmo2(Family):
    """Family of ``Olmo2ForCausalLM``."""

    architecture = "Olmo2ForCausalLM"
    settings = (*POST, Rope(), Constant("qk_layernorm_per_head", False))
    weights = table(WEIGHTS, HEAD_NORMS, NORMS)


class Olmo3(Family):
    """Family of ``Olmo3ForCausalLM``: windows in most layers."""

    architecture = "Olmo3ForCausalLM"
    settings = (
        *POST, Rope(by_window=True), Window(by_layer=True), Constant("qk_layernorm_per_head", False)
    )  # fmt: skip
    weights = table(WEIGHTS, HEAD_NORMS, NORMS)
