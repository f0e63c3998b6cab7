"""LightningModules and LightningDataModules ready for a configuration file."""

from typing import TYPE_CHECKING

from megatron_lightning._lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lightning.data.images.image_options import AudioOptions, ImageOptions
    from megatron_lightning.data.rollouts.environments import Turn
    from megatron_lightning.modules.distillation import DistillationModule
    from megatron_lightning.modules.dpo import DPOModule
    from megatron_lightning.modules.finetune_data import FinetuneDataModule
    from megatron_lightning.modules.gpt import GPTLightningModule
    from megatron_lightning.modules.hugging_face import HuggingFaceModule
    from megatron_lightning.modules.masked_data import MaskedDataModule
    from megatron_lightning.modules.masked_module import MaskedLanguageModule
    from megatron_lightning.modules.post_training.policy import PolicyModule
    from megatron_lightning.modules.post_training.reward import RewardModule
    from megatron_lightning.modules.post_training.reward_model import RewardModel
    from megatron_lightning.modules.post_training.rollout_data import RolloutDataModule
    from megatron_lightning.modules.post_training.tool_environment import ToolEnvironment
    from megatron_lightning.modules.post_training.unpaired_data import UnpairedDataModule
    from megatron_lightning.modules.preference_data import PreferenceDataModule
    from megatron_lightning.modules.pretrain_data import PretrainDataModule

__all__ = [
    "AudioOptions",
    "DPOModule",
    "DistillationModule",
    "FinetuneDataModule",
    "GPTLightningModule",
    "HuggingFaceModule",
    "ImageOptions",
    "MaskedDataModule",
    "MaskedLanguageModule",
    "PolicyModule",
    "PreferenceDataModule",
    "PretrainDataModule",
    "RewardModel",
    "RewardModule",
    "RolloutDataModule",
    "ToolEnvironment",
    "Turn",
    "UnpairedDataModule",
]

lazy_attributes(
    __name__,
    {
        "DistillationModule": "megatron_lightning.modules.distillation",
        "DPOModule": "megatron_lightning.modules.dpo",
        "FinetuneDataModule": "megatron_lightning.modules.finetune_data",
        "GPTLightningModule": "megatron_lightning.modules.gpt",
        "HuggingFaceModule": "megatron_lightning.modules.hugging_face",
        "AudioOptions": "megatron_lightning.data.images.image_options",
        "ImageOptions": "megatron_lightning.data.images.image_options",
        "MaskedDataModule": "megatron_lightning.modules.masked_data",
        "MaskedLanguageModule": "megatron_lightning.modules.masked_module",
        "PolicyModule": "megatron_lightning.modules.post_training.policy",
        "PreferenceDataModule": "megatron_lightning.modules.preference_data",
        "PretrainDataModule": "megatron_lightning.modules.pretrain_data",
        "RewardModel": "megatron_lightning.modules.post_training.reward_model",
        "RewardModule": "megatron_lightning.modules.post_training.reward",
        "RolloutDataModule": "megatron_lightning.modules.post_training.rollout_data",
        "ToolEnvironment": "megatron_lightning.modules.post_training.tool_environment",
        "Turn": "megatron_lightning.data.rollouts.environments",
        "UnpairedDataModule": "megatron_lightning.modules.post_training.unpaired_data",
    },
)
