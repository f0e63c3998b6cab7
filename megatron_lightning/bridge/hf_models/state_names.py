"""Tensors of a folder under the names of a model's ``state_dict()``. The installed version of
``transformers`` renames and merges tensors of some families.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_lightning.bridge.auto import AutoBridge
from megatron_lightning.bridge.folders.folder import FolderTensors
from megatron_lightning.bridge.folders.folder_record import KeptFolder
from megatron_lightning.bridge.folders.new_folder import NewFolder
from megatron_lightning.bridge.hf_models.transformers_model import lazy_model
from megatron_lightning.bridge.tensors.lazy import Lazy
from megatron_lightning.optional import HF_FOLDER, require


class _Table(NamedTuple):
    """Tensors in the place of a folder's."""

    path: Path
    """The folder."""
    tensors: Mapping[str, Lazy]
    """Name in the folder -> tensor."""


def state_tensors(
    folder: FolderTensors,
    tensors: Mapping[str, Lazy],
    dtype: torch.dtype | None,
    *,
    trust_remote_code: bool,
) -> dict[str, Lazy]:
    """Return name in the model's ``state_dict()`` -> tensor, tied names included.

    Args:
        folder: The folder.
        tensors: Name in the folder -> tensor.
        dtype: Dtype of floating tensors. None: the folder's.
        trust_remote_code: Whether code in the folder may run.
    """
    config, model_class = _model_of(folder, trust_remote_code=trust_remote_code)
    table = _Table(folder.path, tensors)
    model = lazy_model(table, model_class, config, dtype="auto" if dtype is None else dtype)
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Lazy)}


def tied_tensors(
    folder: FolderTensors, tensors: Mapping[str, Lazy], *, trust_remote_code: bool
) -> dict[str, Lazy]:
    """Return further name in the model's ``state_dict()`` -> tensor in the folder. A folder holds a
    tied tensor once.
    """
    config, _ = _model_of(folder, trust_remote_code=trust_remote_code)
    configs = (config, config.get_text_config())
    if not any(getattr(own, "tie_word_embeddings", False) for own in configs):
        return {}
    state = state_tensors(folder, tensors, None, trust_remote_code=trust_remote_code)
    first = {id(state[name]): name for name in tensors if name in state}
    return {
        name: tensors[first[id(tensor)]]
        for name, tensor in state.items()
        if name not in tensors and id(tensor) in first
    }


def _model_of(folder: FolderTensors, *, trust_remote_code: bool) -> tuple[Any, Any]:
    """Return configuration and class of the folder's model."""
    if isinstance(folder, NewFolder):
        require("transformers", HF_FOLDER)
        import transformers

        return folder.config, getattr(transformers, folder.config.architectures[0])
    if not isinstance(folder, KeptFolder):
        bridge = AutoBridge.from_hf_pretrained(
            str(folder.path), trust_remote_code=trust_remote_code
        )
    else:
        bridge = AutoBridge.from_kept(folder, trust_remote_code=trust_remote_code)
    return bridge.config, bridge.model_class
