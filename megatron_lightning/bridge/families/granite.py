"""Granite 3: Llama with multipliers of embeddings, blocks, scores and logits."""

from megatron_lightning.bridge.families.llama import SETTINGS, WEIGHTS
from megatron_lightning.bridge.position_settings import Rope
from megatron_lightning.bridge.rules import Family
from megatron_lightning.bridge.settings import Biases, Same

MULTIPLIERS = (
    Same("embedding_multiplier", "embedding_multiplier"),
    Same("residual_multiplier", "residual_multiplier"),
    Same("logits_scaling", "logits_scaling"),
    Same("softmax_scale", "attention_multiplier"),
)


class Granite(Family):
    """``GraniteForCausalLM``."""

    architecture = "GraniteForCausalLM"
    settings = (*SETTINGS, Rope(), *MULTIPLIERS, Biases(("attention_bias", "mlp_bias")))
    weights = WEIGHTS
