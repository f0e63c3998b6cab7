"""LightningModules and LightningDataModules ready for a configuration file."""

from typing import TYPE_CHECKING

from megatron_lightning._lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lightning.modules.gpt import GPTLightningModule
    from megatron_lightning.modules.pretrain_data import PretrainDataModule

__all__ = ["GPTLightningModule", "PretrainDataModule"]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "GPTLightningModule": "megatron_lightning.modules.gpt",
        "PretrainDataModule": "megatron_lightning.modules.pretrain_data",
    },
)
