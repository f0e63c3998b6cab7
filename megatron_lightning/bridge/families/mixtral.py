"""Mixtral: Mistral with experts in every layer."""

from megatron_lightning.bridge.families.llama import OURS, SETTINGS, THEIRS, WEIGHTS
from megatron_lightning.bridge.family_rules.family import Family, table
from megatron_lightning.bridge.family_rules.position_settings import Rope, Window
from megatron_lightning.bridge.family_rules.settings import Constant, Same
from megatron_lightning.bridge.tensors.tensor_ops import Experts

MOE = f"{THEIRS}.block_sparse_moe"


class Mixtral(Family):
    """Family of ``MixtralForCausalLM``."""

    architecture = "MixtralForCausalLM"
    settings = (
        *SETTINGS, Rope(), Same("kv_channels", "head_dim"), Window(),
        Same("moe.num_experts", "num_local_experts"),
        Same("moe.router_topk", "num_experts_per_tok"),
        Constant("moe.router_pre_softmax", False),
    )  # fmt: skip
    weights = table(WEIGHTS, {
        f"{OURS}.mlp.router.weight": f"{MOE}.gate.weight",
        f"{OURS}.mlp.experts.linear_fc1.weight": (
            Experts(), f"{MOE}.experts.#.w1.weight", f"{MOE}.experts.#.w3.weight"
        ),
        f"{OURS}.mlp.experts.linear_fc2.weight": (Experts(), f"{MOE}.experts.#.w2.weight"),
    })  # fmt: skip
