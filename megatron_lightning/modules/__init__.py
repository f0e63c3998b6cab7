"""LightningModules and LightningDataModules ready for a configuration file."""

from megatron_lightning.modules.finetune_data import FinetuneDataModule
from megatron_lightning.modules.gpt import GPTLightningModule
from megatron_lightning.modules.hugging_face import HuggingFaceModule
from megatron_lightning.modules.pretrain_data import PretrainDataModule

__all__ = ["FinetuneDataModule", "GPTLightningModule", "HuggingFaceModule", "PretrainDataModule"]
