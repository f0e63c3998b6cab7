"""gpt-oss: sinks, windows in every second layer, and experts with biases and limited gates."""

from megatron_lightning.bridge.families.llama import EPSILON, OURS, SIZES, THEIRS, WEIGHTS
from megatron_lightning.bridge.family_rules.expert_settings import LimitedGate
from megatron_lightning.bridge.family_rules.family import Family, table
from megatron_lightning.bridge.family_rules.position_settings import Rope, Window
from megatron_lightning.bridge.family_rules.settings import Constant, Same
from megatron_lightning.bridge.tensors.tensor_ops import StackedExperts

EXPERTS, THEIR_EXPERTS = f"{OURS}.mlp.experts", f"{THEIRS}.mlp.experts"


class GptOss(Family):
    """Family of ``GptOssForCausalLM``."""

    architecture = "GptOssForCausalLM"
    settings = (
        *SIZES, EPSILON, Rope(), Window(by_layer=True), Same("kv_channels", "head_dim"),
        Constant("activation", "quick_geglu", {"hidden_act": "silu"}), LimitedGate(),
        Constant("glu_linear_offset", 1.0), Constant("softmax_type", "learnable"),
        Constant("add_bias_linear", True, {"attention_bias": True}),
        Same("moe.num_experts", "num_local_experts"),
        Same("moe.router_topk", "num_experts_per_tok"),
        Constant("moe.router_pre_softmax", False), Constant("moe.router_bias", True),
    )  # fmt: skip
    weights = table(WEIGHTS, {
        f"{OURS}.self_attention.core_attention.softmax_offset": f"{THEIRS}.self_attn.sinks",
        f"{OURS}.mlp.router.*": f"{THEIRS}.mlp.router.*",
        f"{EXPERTS}.linear_fc1.weight": (
            StackedExperts(transposed=True, interleaved=True), f"{THEIR_EXPERTS}.gate_up_proj"
        ),
        f"{EXPERTS}.linear_fc1.bias": (
            StackedExperts(interleaved=True), f"{THEIR_EXPERTS}.gate_up_proj_bias"
        ),
        f"{EXPERTS}.linear_fc2.weight": (
            StackedExperts(transposed=True), f"{THEIR_EXPERTS}.down_proj"
        ),
        f"{EXPERTS}.linear_fc2.bias": f"{THEIR_EXPERTS}.down_proj_bias",
    })  # fmt: skip
