"""GPT-2: learned positions, LayerNorm, biases, and matrices stored as [inputs, outputs]."""

from megatron_lightning.bridge.family_rules.family import Family, table
from megatron_lightning.bridge.family_rules.settings import Choice, Constant, Same
from megatron_lightning.bridge.tensors.tensor_ops import Copied, QueryKeyValue

OURS, THEIRS = "decoder.layers.*", "transformer.h.*"
WEIGHTS = table(
    {
        "embedding.word_embeddings.weight": "transformer.wte.weight",
        "embedding.position_embeddings.weight": "transformer.wpe.weight",
        f"{OURS}.input_layernorm.*": f"{THEIRS}.ln_1.*",
        f"{OURS}.self_attention.linear_qkv.*": (QueryKeyValue(True), f"{THEIRS}.attn.c_attn.*"),
        f"{OURS}.self_attention.linear_proj.*": (Copied(True), f"{THEIRS}.attn.c_proj.*"),
        f"{OURS}.pre_mlp_layernorm.*": f"{THEIRS}.ln_2.*",
        f"{OURS}.mlp.linear_fc1.*": (Copied(True), f"{THEIRS}.mlp.c_fc.*"),
        f"{OURS}.mlp.linear_fc2.*": (Copied(True), f"{THEIRS}.mlp.c_proj.*"),
        "decoder.final_layernorm.*": "transformer.ln_f.*",
        "output_layer.weight": "lm_head.weight",
    }
)


class GPT2(Family):
    """Family of ``GPT2LMHeadModel``."""

    architecture = "GPT2LMHeadModel"
    settings = (
        Same("num_layers", "n_layer"), Same("hidden_size", "n_embd"),
        Same("num_attention_heads", "n_head"), Same("ffn_hidden_size", "n_inner"),
        Same("vocab_size", "vocab_size"), Same("max_sequence_length", "n_positions"),
        Same("layernorm_epsilon", "layer_norm_epsilon"),
        Same("share_embeddings_and_output_weights", "tie_word_embeddings"),
        Same("attention_dropout", "attn_pdrop"), Same("hidden_dropout", "resid_pdrop"),
        Same("embedding_dropout", "embd_pdrop"),
        Same("init_method_std", "initializer_range"),
        Choice("activation", "activation_function", {"gelu_tanh": "gelu_new", "gelu": "gelu"}),
        Constant("normalization", "LayerNorm"), Constant("add_bias_linear", True),
        Constant("position_embedding_type", "learned_absolute"),
    )  # fmt: skip
    weights = WEIGHTS
