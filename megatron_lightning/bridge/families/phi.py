"""Phi-3 and Phi-4: Llama with fused matrices for queries, keys and values, and for gate and up."""

from megatron_lightning.bridge.families.llama import OURS, SETTINGS, THEIRS, WEIGHTS
from megatron_lightning.bridge.family_rules.family import Family, table
from megatron_lightning.bridge.family_rules.pattern_settings import WithoutEffect
from megatron_lightning.bridge.family_rules.position_settings import Rope, Window
from megatron_lightning.bridge.family_rules.settings import Constant, Same
from megatron_lightning.bridge.tensors.tensor_ops import QueryKeyValue


class Phi3(Family):
    """Family of ``Phi3ForCausalLM``, Phi-4 as well."""

    architecture = "Phi3ForCausalLM"
    settings = (
        *SETTINGS, Rope(partial=True, original="original_max_position_embeddings"), Window(),
        Same("hidden_dropout", "resid_pdrop"), Constant("embedding_dropout", 0.0),
        WithoutEffect("embd_pdrop"),
    )  # fmt: skip
    weights = table(
        WEIGHTS,
        {
            f"{OURS}.self_attention.linear_qkv.*": (
                QueryKeyValue(),
                f"{THEIRS}.self_attn.qkv_proj.*",
            ),
            f"{OURS}.mlp.linear_fc1.*": f"{THEIRS}.mlp.gate_up_proj.*",
        },
    )
