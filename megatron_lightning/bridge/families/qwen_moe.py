"""Qwen 2 and 3 with experts, and OLMoE."""

from typing import Any

from megatron_lightning.bridge.families.llama import OURS, SETTINGS, THEIRS, WEIGHTS
from megatron_lightning.bridge.families.qwen import HEAD_NORMS, WINDOW
from megatron_lightning.bridge.family_rules.expert_settings import SparseSteps
from megatron_lightning.bridge.family_rules.family import Family, table
from megatron_lightning.bridge.family_rules.position_settings import Rope, Window
from megatron_lightning.bridge.family_rules.settings import Choice, Constant, Same
from megatron_lightning.bridge.tensors.tensor_ops import Experts, Stacked

HEAD_DIM = Same("kv_channels", "head_dim")
TOPK = (
    Same("moe.router_topk", "num_experts_per_tok"),
    Choice("moe.router_pre_softmax", "norm_topk_prob", {False: True, True: False}),
)
WIDTH = Same("moe.ffn_hidden_size", "moe_intermediate_size")
EXPERTS = table({
    f"{OURS}.mlp.router.weight": f"{THEIRS}.mlp.gate.weight",
    f"{OURS}.mlp.experts.linear_fc1.weight": (
        Experts(), *(f"{THEIRS}.mlp.experts.#.{x}_proj.weight" for x in ("gate", "up"))
    ),
    f"{OURS}.mlp.experts.linear_fc2.weight": (
        Experts(), f"{THEIRS}.mlp.experts.#.down_proj.weight"
    ),
})  # fmt: skip
SHARED, THEIR_SHARED = f"{OURS}.mlp.shared_experts", f"{THEIRS}.mlp.shared_expert"
GATED_EXPERT: tuple[Any, ...] = (
    Same("moe.num_experts", "num_experts"), SparseSteps(),
    Same("moe.shared_expert_intermediate_size", "shared_expert_intermediate_size"),
    Constant("moe.shared_expert_gate", True),
)  # fmt: skip
GATED_WEIGHTS = table({
    f"{SHARED}.gate.weight": f"{THEIRS}.mlp.shared_expert_gate.weight",
    f"{SHARED}.linear_fc1.weight": (
        Stacked(), f"{THEIR_SHARED}.gate_proj.weight", f"{THEIR_SHARED}.up_proj.weight"
    ),
    f"{SHARED}.linear_fc2.weight": f"{THEIR_SHARED}.down_proj.weight",
})  # fmt: skip


class Qwen3Moe(Family):
    """Family of ``Qwen3MoeForCausalLM``."""

    architecture = "Qwen3MoeForCausalLM"
    settings = (
        *SETTINGS, Rope(), Window(switch="use_sliding_window"), HEAD_DIM, *TOPK, WIDTH,
        Constant("qk_layernorm", True), Same("moe.num_experts", "num_local_experts"), SparseSteps(),
    )  # fmt: skip
    weights = table(WEIGHTS, HEAD_NORMS, EXPERTS)


class Qwen2Moe(Family):
    """Family of ``Qwen2MoeForCausalLM``."""

    architecture = "Qwen2MoeForCausalLM"
    settings = (
        *SETTINGS, Rope(), WINDOW, Same("add_qkv_bias", "qkv_bias"), *TOPK, WIDTH, *GATED_EXPERT,
    )  # fmt: skip
    weights = table(WEIGHTS, EXPERTS, GATED_WEIGHTS)


class Olmoe(Family):
    """Family of ``OlmoeForCausalLM``."""

    architecture = "OlmoeForCausalLM"
    settings = (
        *SETTINGS, Rope(), Constant("qk_layernorm", True), Constant("qk_layernorm_per_head", False),
        *TOPK, Same("moe.num_experts", "num_experts"),
    )  # fmt: skip
    weights = table(WEIGHTS, HEAD_NORMS, EXPERTS)
