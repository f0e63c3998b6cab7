"""LightningModules and LightningDataModules ready for a configuration file."""

from megatron_lightning.modules.distillation import DistillationModule
from megatron_lightning.modules.dpo import DPOModule
from megatron_lightning.modules.finetune_data import FinetuneDataModule
from megatron_lightning.modules.gpt import GPTLightningModule
from megatron_lightning.modules.hugging_face import HuggingFaceModule
from megatron_lightning.modules.masked_data import MaskedDataModule
from megatron_lightning.modules.masked_module import MaskedLanguageModule
from megatron_lightning.modules.preference_data import PreferenceDataModule
from megatron_lightning.modules.pretrain_data import PretrainDataModule

__all__ = [
    "DPOModule",
    "DistillationModule",
    "FinetuneDataModule",
    "GPTLightningModule",
    "HuggingFaceModule",
    "MaskedDataModule",
    "MaskedLanguageModule",
    "PreferenceDataModule",
    "PretrainDataModule",
]
