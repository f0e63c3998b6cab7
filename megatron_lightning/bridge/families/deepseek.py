"""DeepSeek V2 and V3 (also Kimi K2): latent attention, shared experts, multi-token prediction."""

from collections.abc import Mapping

from megatron_lightning.bridge.families import latent
from megatron_lightning.bridge.families.llama import OURS, THEIRS, WEIGHTS
from megatron_lightning.bridge.families.qwen_moe import EXPERTS, WIDTH
from megatron_lightning.bridge.family_rules import expert_settings as rows
from megatron_lightning.bridge.family_rules.family import Family, table
from megatron_lightning.bridge.family_rules.settings import Constant, Same

MOE = (
    Same("moe.num_experts", "n_routed_experts"), Same("moe.router_topk", "num_experts_per_tok"),
    Same("moe.router_topk_scaling_factor", "routed_scaling_factor", none=1.0), WIDTH,
    rows.FirstDense(), rows.SharedExperts(),
)  # fmt: skip

EXPERT_BIAS: Mapping[str, str] = {
    f"{OURS}.mlp.router.expert_bias": f"{THEIRS}.mlp.gate.e_score_correction_bias"
}


class DeepseekV2(Family):
    """Family of ``DeepseekV2ForCausalLM``."""

    architecture = "DeepseekV2ForCausalLM"
    settings = (
        *latent.SETTINGS,
        *MOE,
        rows.Groups(1, switch=True),
        Constant("moe.router_pre_softmax", True),
    )
    weights = table(WEIGHTS, latent.WEIGHTS, EXPERTS)


class DeepseekV3(Family):
    """Family of ``DeepseekV3ForCausalLM``."""

    architecture = "DeepseekV3ForCausalLM"
    settings = (
        *latent.SETTINGS, *MOE, rows.Groups(2), rows.NormalizedScores(),
        Constant("moe.router_enable_expert_bias", True),
        Constant("moe.router_score_function", "sigmoid", {"rope_interleave": True}),
        Constant("moe.router_load_balancing_type", "none"),
        Same("mtp_num_layers", "num_nextn_predict_layers", none=0),
    )  # fmt: skip
    weights = table(WEIGHTS, latent.WEIGHTS, EXPERTS, latent.MTP_WEIGHTS, EXPERT_BIAS)
    copies = latent.MTP_COPIES
