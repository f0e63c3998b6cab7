"""EXAONE 4: norms of outputs and heads, and rotary positions in layers with a window."""

from megatron_lightning.bridge.families.llama import WEIGHTS
from megatron_lightning.bridge.families.olmo2 import NORMS, POST
from megatron_lightning.bridge.families.qwen import HEAD_NORMS
from megatron_lightning.bridge.family_rules.family import Family, table
from megatron_lightning.bridge.family_rules.position_settings import Rope, RotatedWindows, Window


class Exaone4(Family):
    """Family of ``Exaone4ForCausalLM``."""

    architecture = "Exaone4ForCausalLM"
    settings = (*POST, Rope(), Window(by_layer=True), RotatedWindows())
    weights = table(WEIGHTS, HEAD_NORMS, NORMS)
