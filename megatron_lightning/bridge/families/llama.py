"""Llama 2 to 3.2. Most families extend the tables of Llama."""

from typing import Any

from megatron_lightning.bridge.family_rules.family import Family, table
from megatron_lightning.bridge.family_rules.position_settings import Rope
from megatron_lightning.bridge.family_rules.settings import Biases, Choice, Same
from megatron_lightning.bridge.tensors.tensor_ops import QueryKeyValue, Stacked

OURS, THEIRS = "decoder.layers.*", "model.layers.*"
SIZES: tuple[Any, ...] = (
    Same("num_layers", "num_hidden_layers"),
    Same("hidden_size", "hidden_size"),
    Same("num_attention_heads", "num_attention_heads"),
    Same("num_query_groups", "num_key_value_heads"),
    Same("ffn_hidden_size", "intermediate_size"),
    Same("vocab_size", "vocab_size"),
    Same("max_sequence_length", "max_position_embeddings"),
    Same("share_embeddings_and_output_weights", "tie_word_embeddings"),
    Same("attention_dropout", "attention_dropout"),
    Same("init_method_std", "initializer_range"),
)
EPSILON = Same("layernorm_epsilon", "rms_norm_eps")
SETTINGS = (*SIZES, EPSILON, Choice("activation", "hidden_act", {"swiglu": "silu"}))
WEIGHTS = table({
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    f"{OURS}.input_layernorm.weight": f"{THEIRS}.input_layernorm.weight",
    f"{OURS}.self_attention.linear_qkv.*": (
        QueryKeyValue(), *(f"{THEIRS}.self_attn.{x}_proj.*" for x in "qkv")
    ),
    f"{OURS}.self_attention.linear_proj.*": f"{THEIRS}.self_attn.o_proj.*",
    f"{OURS}.pre_mlp_layernorm.weight": f"{THEIRS}.post_attention_layernorm.weight",
    f"{OURS}.mlp.linear_fc1.*": (Stacked(), f"{THEIRS}.mlp.gate_proj.*", f"{THEIRS}.mlp.up_proj.*"),
    f"{OURS}.mlp.linear_fc2.*": f"{THEIRS}.mlp.down_proj.*",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
})  # fmt: skip


class Llama(Family):
    """Family of ``LlamaForCausalLM``."""

    architecture = "LlamaForCausalLM"
    settings = (
        *SETTINGS,
        Rope(),
        Same("kv_channels", "head_dim"),
        Biases(("attention_bias", "mlp_bias")),
    )
    weights = WEIGHTS
