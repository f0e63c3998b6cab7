"""Mamba-2: every layer has a mixer of Mamba-2 alone."""

from typing import Any

from megatron_lightning.bridge.family_rules.family import Family, table
from megatron_lightning.bridge.family_rules.pattern_settings import (
    AllMamba,
    StepLimit,
    WithoutEffect,
)
from megatron_lightning.bridge.family_rules.settings import Constant, Same

OURS, THEIRS = "decoder.layers.*", "backbone.layers.*"
NORM = table({f"{OURS}.norm.weight": f"{THEIRS}.norm.weight"})
MIXER = table({f"{OURS}.mixer.{name}": f"{THEIRS}.mixer.{name}" for name in (
    "A_log", "D", "dt_bias", "in_proj.weight", "conv1d.weight", "conv1d.bias", "norm.weight",
    "out_proj.weight",
)})  # fmt: skip
END = table({
    "embedding.word_embeddings.weight": "backbone.embeddings.weight",
    "decoder.final_layernorm.weight": "backbone.norm_f.weight",
    "output_layer.weight": "lm_head.weight",
})  # fmt: skip
CONSTANTS: tuple[Any, ...] = (
    Same("hidden_size", "hidden_size"), Same("vocab_size", "vocab_size"),
    Same("layernorm_epsilon", "layer_norm_epsilon"), Same("init_method_std", "initializer_range"),
    Same("mamba.num_groups", "n_groups"), Same("mamba.conv_kernel", "conv_kernel"),
    Same("mamba.chunk_size", "chunk_size"),
    Constant("normalization", "RMSNorm", {"use_bias": False, "use_conv_bias": True}),
    Constant("position_embedding_type", "none"),
    WithoutEffect(
        "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"
    ),
)  # fmt: skip


class Mamba2(Family):
    """Family of ``Mamba2ForCausalLM``."""

    architecture = "Mamba2ForCausalLM"
    settings = (
        *CONSTANTS, AllMamba(), StepLimit("time_step_limit"),
        Same("mamba.num_heads", "num_heads"), Same("mamba.head_dim", "head_dim"),
        Same("mamba.state_dim", "state_size"),
        Same("max_sequence_length", "max_position_embeddings"),
        Same("fp32_residual_connection", "residual_in_fp32"),
        Same("share_embeddings_and_output_weights", "tie_word_embeddings"),
        Constant("num_attention_heads", 1, {"hidden_act": "silu"}),
        WithoutEffect("time_step_rank"),
    )  # fmt: skip
    weights = table(END, MIXER, NORM)
