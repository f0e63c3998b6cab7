"""Model families in plain PyTorch, their configuration, and their sharding plans."""

from typing import TYPE_CHECKING

from megatron_lightning._lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lightning.config import (
        DeltaNetConfig,
        LatentAttentionConfig,
        MambaConfig,
        MoEConfig,
        RopeScaling,
        TransformerConfig,
    )
    from megatron_lightning.models.blueprint import num_parameters
    from megatron_lightning.models.plans.gpt import gpt_plan, llama_hf_plan
    from megatron_lightning.models.transformer import GPTModel

__all__ = [
    "DeltaNetConfig",
    "GPTModel",
    "LatentAttentionConfig",
    "MambaConfig",
    "MoEConfig",
    "RopeScaling",
    "TransformerConfig",
    "gpt_plan",
    "llama_hf_plan",
    "num_parameters",
]

lazy_attributes(
    __name__,
    {
        "DeltaNetConfig": "megatron_lightning.config",
        "GPTModel": "megatron_lightning.models.transformer",
        "LatentAttentionConfig": "megatron_lightning.config",
        "MambaConfig": "megatron_lightning.config",
        "MoEConfig": "megatron_lightning.config",
        "RopeScaling": "megatron_lightning.config",
        "TransformerConfig": "megatron_lightning.config",
        "gpt_plan": "megatron_lightning.models.plans.gpt",
        "llama_hf_plan": "megatron_lightning.models.plans.gpt",
        "num_parameters": "megatron_lightning.models.blueprint",
    },
)
