"""Sizes of the model in a Hugging Face folder. The bridge, and with it torch, is imported only if a
recipe names a folder.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import CheckpointError, ConfigError


def folder_config(path: str, **options: Any) -> TransformerConfig:
    """Return the configuration of the :class:`GPTModel` with the sizes of a folder.

    Args:
        path: Folder or Hub id.
        options: Options of ``AutoBridge.from_hf_pretrained``.

    Raises:
        ConfigError: If the folder cannot be read, or holds another kind of model.
    """
    bridge: Any = import_module("megatron_lightning.bridge.auto").AutoBridge
    try:
        config: TransformerConfig = bridge.from_hf_pretrained(path, **options).to_config()
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    return config
