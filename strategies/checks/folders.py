"""Hugging Face folders in checkpoints: refusals before any process starts."""

from __future__ import annotations

import lightning.pytorch as pl

from megatron_lightning.bridge.folders.remembered_folders import kept_folders
from megatron_lightning.checkpoint.format.storage import is_remote
from megatron_lightning.config import CheckpointOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.strategies.checks.module import is_built_later


def check_folder_saving(
    options: CheckpointOptions, module: pl.LightningModule, trainer: pl.Trainer, *, has_plugin: bool
) -> None:
    """Check requested Hugging Face folders beside the checkpoints of this fit.

    Args:
        options: Options of checkpoints.
        module: The LightningModule.
        trainer: The module's Trainer.
        has_plugin: Whether a plugin of the user's writes checkpoints.

    Raises:
        ConfigError: For plain files, object stores, and models not loaded from a folder.
    """
    if options.also_save_hf is None:
        return
    option = f"also_save_hf={options.also_save_hf!r} of CheckpointOptions"
    if has_plugin:
        raise ConfigError(
            f"{option} writes a folder into checkpoint directories, and a checkpoint plugin of "
            "your own writes other ones. Leave out the plugin, or also_save_hf."
        )
    for callback in getattr(trainer, "checkpoint_callbacks", []):
        if is_remote(str(getattr(callback, "dirpath", None) or "")):
            raise ConfigError(
                f"{option} writes to file systems only, and ModelCheckpoint saves to "
                f"{callback.dirpath}. Save to a path, or leave out also_save_hf and write a folder "
                "later: megatron-lightning convert export."
            )
    if not is_built_later(module) and not kept_folders(module):
        raise ConfigError(
            f"{option} needs a model that came from a Hugging Face folder, and "
            f"{type(module).__name__} has none. Make one by AutoBridge.from_hf_pretrained(path)."
            "to_model() in configure_model, use HuggingFaceModule, or leave out also_save_hf."
        )
