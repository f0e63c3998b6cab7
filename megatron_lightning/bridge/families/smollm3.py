"""SmolLM 3: Llama with layers without rotary positions."""

from megatron_lightning.bridge.families.llama import SETTINGS, WEIGHTS
from megatron_lightning.bridge.families.qwen import WINDOW
from megatron_lightning.bridge.family_rules.family import Family
from megatron_lightning.bridge.family_rules.position_settings import Rope, RotatedLayers
from megatron_lightning.bridge.family_rules.settings import Biases


class SmolLM3(Family):
    """Family of ``SmolLM3ForCausalLM``."""

    architecture = "SmolLM3ForCausalLM"
    settings = (
        *SETTINGS, Rope(), RotatedLayers(), WINDOW, Biases(("attention_bias", "mlp_bias"))
    )  # fmt: skip
    weights = WEIGHTS
