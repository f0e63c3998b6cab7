"""Rows of latent attention, shared experts and multi-token prediction, in DeepSeek's names."""

from megatron_lightning.bridge.families.llama import OURS, THEIRS
from megatron_lightning.bridge.families.llama import SETTINGS as LLAMA
from megatron_lightning.bridge.family_rules.family import table
from megatron_lightning.bridge.family_rules.position_settings import Rope
from megatron_lightning.bridge.family_rules.settings import Choice, Constant, KeyForEveryHead, Same
from megatron_lightning.bridge.tensors.tensor_ops import Stacked

SHARED, THEIR_SHARED = f"{OURS}.mlp.shared_experts", f"{THEIRS}.mlp.shared_experts"
PREDICTING = "mtp.layers.*"
SETTINGS = (
    *LLAMA, Rope(), KeyForEveryHead(), Constant("qk_layernorm", True),
    Choice("layernorm_epsilon", "rms_norm_eps", {1e-6: 1e-6}),  # norms of latents know no other
    Same("mla.q_lora_rank", "q_lora_rank", none=None), Same("mla.kv_lora_rank", "kv_lora_rank"),
    Same("mla.qk_head_dim", "qk_nope_head_dim"), Same("mla.v_head_dim", "v_head_dim"),
    Same("mla.qk_pos_emb_head_dim", "qk_rope_head_dim"),
)  # fmt: skip
SHARED_WEIGHTS = table({
    f"{SHARED}.linear_fc1.weight": (
        Stacked(), f"{THEIR_SHARED}.gate_proj.weight", f"{THEIR_SHARED}.up_proj.weight"
    ),
    f"{SHARED}.linear_fc2.weight": f"{THEIR_SHARED}.down_proj.weight",
})  # fmt: skip
_NAMES = (
    ("q_proj", "q_proj"), ("q_down_proj", "q_a_proj"), ("q_up_proj", "q_b_proj"),
    ("kv_down_proj", "kv_a_proj_with_mqa"), ("kv_up_proj", "kv_b_proj"),
)  # fmt: skip
WEIGHTS = table({
    **{f"{OURS}.self_attention.linear_{a}.weight": f"{THEIRS}.self_attn.{b}.weight"
       for a, b in _NAMES},
    **{f"{OURS}.self_attention.{x}_layernorm.weight": f"{THEIRS}.self_attn.{x}_a_layernorm.weight"
       for x in ("q", "kv")},
    **SHARED_WEIGHTS,
})  # fmt: skip
MTP_WEIGHTS = table(
    {
        **{
            f"{PREDICTING}.{x}.weight": f"{THEIRS}.{x}.weight"
            for x in ("enorm", "hnorm", "eh_proj")
        },
        f"{PREDICTING}.final_layernorm.weight": f"{THEIRS}.shared_head.norm.weight",
    }
)
MTP_COPIES = table(
    {
        f"{THEIRS}.embed_tokens.weight": "embedding.word_embeddings.weight",
        f"{THEIRS}.shared_head.head.weight": "output_layer.weight",
    }
)
