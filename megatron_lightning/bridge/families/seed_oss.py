"""Seed-OSS: Llama with biases of queries, keys and values."""

from megatron_lightning.bridge.families.llama import SETTINGS, WEIGHTS
from megatron_lightning.bridge.family_rules.family import Family
from megatron_lightning.bridge.family_rules.position_settings import Rope
from megatron_lightning.bridge.family_rules.settings import Constant, Same


class SeedOss(Family):
    """Family of ``SeedOssForCausalLM``."""

    architecture = "SeedOssForCausalLM"
    settings = (
        *SETTINGS, Rope(), Same("kv_channels", "head_dim"), Same("add_qkv_bias", "attention_bias"),
        Constant("add_bias_linear", False, {"attention_out_bias": False, "mlp_bias": False}),
        Same("hidden_dropout", "residual_dropout"), Constant("embedding_dropout", 0.0),
    )  # fmt: skip
    weights = WEIGHTS
