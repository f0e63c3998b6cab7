"""Granite 3, with experts as well: multipliers of embeddings, blocks, scores and logits."""

from megatron_lightning.bridge.families.llama import OURS, SETTINGS, THEIRS, WEIGHTS
from megatron_lightning.bridge.family_rules.family import Family, table
from megatron_lightning.bridge.family_rules.position_settings import Rope
from megatron_lightning.bridge.family_rules.settings import Biases, Constant, Same
from megatron_lightning.bridge.tensors.tensor_ops import StackedExperts

MULTIPLIERS = (
    Same("embedding_multiplier", "embedding_multiplier"),
    Same("residual_multiplier", "residual_multiplier"),
    Same("logits_scaling", "logits_scaling"),
    Same("softmax_scale", "attention_multiplier"),
)
MOE = f"{THEIRS}.block_sparse_moe"


class Granite(Family):
    """Family of ``GraniteForCausalLM``."""

    architecture = "GraniteForCausalLM"
    settings = (*SETTINGS, Rope(), *MULTIPLIERS, Biases(("attention_bias", "mlp_bias")))
    weights = WEIGHTS


class GraniteMoe(Family):
    """Family of ``GraniteMoeForCausalLM``."""

    architecture = "GraniteMoeForCausalLM"
    settings = (
        *SETTINGS, Rope(), *MULTIPLIERS, Same("moe.num_experts", "num_local_experts"),
        Same("moe.router_topk", "num_experts_per_tok"), Constant("moe.router_pre_softmax", False),
    )  # fmt: skip
    weights = table(WEIGHTS, {
        f"{OURS}.mlp.router.weight": f"{MOE}.router.layer.weight",
        f"{OURS}.mlp.experts.linear_fc1.weight": (StackedExperts(), f"{MOE}.input_linear.weight"),
        f"{OURS}.mlp.experts.linear_fc2.weight": (StackedExperts(), f"{MOE}.output_linear.weight"),
    })  # fmt: skip
