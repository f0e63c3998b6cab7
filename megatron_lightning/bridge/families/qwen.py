"""Qwen 2, 2.5 and 3: biases of queries, keys and values, or norms of their heads."""

from megatron_lightning.bridge.families.llama import OURS, SETTINGS, THEIRS, WEIGHTS
from megatron_lightning.bridge.family_rules.family import Family, table
from megatron_lightning.bridge.family_rules.position_settings import Rope, Window
from megatron_lightning.bridge.family_rules.settings import Constant, Same

HEAD_NORMS = table(
    {
        f"{OURS}.self_attention.{x}_layernorm.weight": f"{THEIRS}.self_attn.{x}_norm.weight"
        for x in "qk"
    }
)
WINDOW = Window(switch="use_sliding_window", by_layer=True)


class Qwen2(Family):
    """Family of ``Qwen2ForCausalLM``, Qwen 2.5 as well."""

    architecture = "Qwen2ForCausalLM"
    settings = (*SETTINGS, Rope(), WINDOW, Constant("add_qkv_bias", True))
    weights = WEIGHTS


class Qwen3(Family):
    """Family of ``Qwen3ForCausalLM``."""

    architecture = "Qwen3ForCausalLM"
    settings = (
        *SETTINGS, Rope(), WINDOW, Same("kv_channels", "head_dim"), Constant("qk_layernorm", True)
    )  # fmt: skip
    weights = table(WEIGHTS, HEAD_NORMS)
