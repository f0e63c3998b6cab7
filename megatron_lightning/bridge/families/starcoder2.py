"""StarCoder 2: LayerNorm, biases, and gelu without a gate."""

from megatron_lightning.bridge.families.llama import OURS, SIZES, THEIRS, WEIGHTS
from megatron_lightning.bridge.family_rules.family import Family, table
from megatron_lightning.bridge.family_rules.position_settings import Rope, Window
from megatron_lightning.bridge.family_rules.settings import Choice, Constant, Same


class Starcoder2(Family):
    """Family of ``Starcoder2ForCausalLM``."""

    architecture = "Starcoder2ForCausalLM"
    settings = (
        *SIZES, Rope(), Window(), Same("layernorm_epsilon", "norm_epsilon"),
        Choice("activation", "hidden_act", {"gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu"}),
        Same("add_bias_linear", "use_bias"), Constant("normalization", "LayerNorm"),
        Same("hidden_dropout", "residual_dropout"), Same("embedding_dropout"),
    )  # fmt: skip
    weights = table(WEIGHTS, {
        f"{OURS}.input_layernorm.*": f"{THEIRS}.input_layernorm.*",
        f"{OURS}.pre_mlp_layernorm.*": f"{THEIRS}.post_attention_layernorm.*",
        f"{OURS}.mlp.linear_fc1.*": f"{THEIRS}.mlp.c_fc.*",
        f"{OURS}.mlp.linear_fc2.*": f"{THEIRS}.mlp.c_proj.*",
        "decoder.final_layernorm.*": "model.norm.*",
    })  # fmt: skip
