"""Mistral and Ministral: Llama with sliding windows."""

from megatron_lightning.bridge.families.llama import SETTINGS, WEIGHTS
from megatron_lightning.bridge.family_rules.family import Family
from megatron_lightning.bridge.family_rules.position_settings import Rope, Window
from megatron_lightning.bridge.family_rules.settings import Same


class Mistral(Family):
    """Family of ``MistralForCausalLM``."""

    architecture = "MistralForCausalLM"
    settings = (*SETTINGS, Rope(), Same("kv_channels", "head_dim"), Window())
    weights = WEIGHTS


class Ministral(Family):
    """Family of ``MinistralForCausalLM``."""

    architecture = "MinistralForCausalLM"
    settings = (*SETTINGS, Rope(), Same("kv_channels", "head_dim"), Window(by_layer=True))
    weights = WEIGHTS


class Cwm(Family):
    """Family of ``CwmForCausalLM`` (Code World Model)."""

    architecture = "CwmForCausalLM"
    settings = Ministral.settings
    weights = WEIGHTS
