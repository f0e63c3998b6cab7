"""Nemotron-H: layers with a single mixer by pattern, Mamba-2, attention, feed-forward, experts."""

from typing import Any

from megatron_lightning.bridge.families.mamba2 import CONSTANTS, END, MIXER, NORM, OURS, THEIRS
from megatron_lightning.bridge.families.qwen_moe import WIDTH
from megatron_lightning.bridge.family_rules import expert_settings as rows
from megatron_lightning.bridge.family_rules.family import Family, table
from megatron_lightning.bridge.family_rules.pattern_settings import (
    LayerTypes,
    StepLimit,
    WithoutEffect,
)
from megatron_lightning.bridge.family_rules.settings import Choice, Constant, Same
from megatron_lightning.bridge.tensors.tensor_ops import Experts, QueryKeyValue

EXPERTS: tuple[Any, ...] = (
    Same("moe.num_experts", "n_routed_experts"), Same("moe.router_topk", "num_experts_per_tok"),
    Same("moe.router_topk_scaling_factor", "routed_scaling_factor", none=1.0), WIDTH,
    Same("moe.shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    Same("moe.latent_size", "moe_latent_size"),
    rows.Groups(2), rows.NormalizedScores(), Constant("moe.router_enable_expert_bias", True),
    Constant("moe.router_score_function", "sigmoid"),
    Constant("moe.router_load_balancing_type", "none"),
)  # fmt: skip


class NemotronH(Family):
    """Family of ``NemotronHForCausalLM``."""

    architecture = "NemotronHForCausalLM"
    prefix = "backbone"  # in transformers' class: model
    settings = (
        *CONSTANTS, LayerTypes(EXPERTS), StepLimit("time_step_min"),
        Same("mamba.num_heads", "mamba_num_heads"), Same("mamba.head_dim", "mamba_head_dim"),
        Same("mamba.state_dim", "ssm_state_size"),
        Same("num_attention_heads", "num_attention_heads"),
        Same("num_query_groups", "num_key_value_heads"), Same("kv_channels", "head_dim"),
        Same("ffn_hidden_size", "intermediate_size"),
        Same("max_sequence_length", "max_position_embeddings"),
        Same("attention_dropout", "attention_dropout"),
        Choice("activation", "mlp_hidden_act", {"squared_relu": "relu2", "silu": "silu"}),
        Constant("add_bias_linear", False, {
            "mamba_hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
            "mamba_proj_bias": False, "sliding_window": None,
            "tie_word_embeddings": False,
        }),
        WithoutEffect(
            "use_mamba_kernels", "num_logits_to_keep", "mamba_ssm_cache_dtype", "expand",
            "moe_shared_expert_overlap", "n_shared_experts", "mtp_layers_block_type",
            "residual_in_fp32", "hidden_dropout", "time_step_limit", "num_nextn_predict_layers",
        ),
    )  # fmt: skip
    weights = table(END, MIXER, NORM, {
        f"{OURS}.input_layernorm.weight": f"{THEIRS}.norm.weight",
        f"{OURS}.self_attention.linear_qkv.*": (
            QueryKeyValue(), *(f"{THEIRS}.mixer.{x}_proj.*" for x in "qkv")
        ),
        f"{OURS}.self_attention.linear_proj.*": f"{THEIRS}.mixer.o_proj.*",
        f"{OURS}.pre_mlp_layernorm.weight": f"{THEIRS}.norm.weight",
        f"{OURS}.mlp.linear_fc1.*": f"{THEIRS}.mixer.up_proj.*",
        f"{OURS}.mlp.linear_fc2.*": f"{THEIRS}.mixer.down_proj.*",
        f"{OURS}.mlp.router.weight": f"{THEIRS}.mixer.gate.weight",
        f"{OURS}.mlp.router.expert_bias": f"{THEIRS}.mixer.gate.e_score_correction_bias",
        f"{OURS}.mlp.experts.linear_fc1.weight": (
            Experts(), f"{THEIRS}.mixer.experts.#.up_proj.weight"
        ),
        f"{OURS}.mlp.experts.linear_fc2.weight": (
            Experts(), f"{THEIRS}.mixer.experts.#.down_proj.weight"
        ),
        f"{OURS}.mlp.fc1_latent_proj.weight": f"{THEIRS}.mixer.fc1_latent_proj.weight",
        f"{OURS}.mlp.fc2_latent_proj.weight": f"{THEIRS}.mixer.fc2_latent_proj.weight",
        f"{OURS}.mlp.shared_experts.linear_fc1.weight": (
            f"{THEIRS}.mixer.shared_experts.up_proj.weight"
        ),
        f"{OURS}.mlp.shared_experts.linear_fc2.weight": (
            f"{THEIRS}.mixer.shared_experts.down_proj.weight"
        ),
    })  # fmt: skip
