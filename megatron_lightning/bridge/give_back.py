"""Checkpoints as Hugging Face folders."""

from __future__ import annotations

import os

import torch

from megatron_lightning.bridge.auto import AutoBridge
from megatron_lightning.bridge.export import fills_of_checkpoint
from megatron_lightning.bridge.folder import FolderTensors
from megatron_lightning.bridge.lazy import Lazy
from megatron_lightning.bridge.pieces import assembled
from megatron_lightning.checkpoint.kept_files import kept_entry
from megatron_lightning.checkpoint.source import CheckpointSource, open_checkpoint
from megatron_lightning.errors import CheckpointError


def tensors_of_checkpoint(
    checkpoint: str | os.PathLike[str],
    *,
    like: str | None = None,
    model: str | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[FolderTensors, dict[str, Lazy]]:
    """Return the folder that a checkpoint is written as, and its tensors, read when needed.

    Args:
        checkpoint: A checkpoint of any layout.
        like: Folder or Hub id; None: the one that the checkpoint keeps.
        model: Path of the model in the LightningModule; None: the first that came from a folder.
        dtype: Dtype of floating tensors; None: the folder's.
        revision: Branch, tag or commit of the Hub id.
        trust_remote_code: Whether code in the folder may run.

    Raises:
        CheckpointError: If the checkpoint is not of the folder's model.
    """
    source = open_checkpoint(checkpoint)
    state = source.state()
    found = kept_entry(state, model)
    if like is None and found is not None:
        bridge = AutoBridge.from_checkpoint(
            checkpoint, model=model, reads=False, trust_remote_code=trust_remote_code
        )
    else:
        if like is None:
            like, revision = _origin(source, checkpoint)
        bridge = AutoBridge.from_hf_pretrained(
            like, revision=revision, trust_remote_code=trust_remote_code
        )
    folder, parameters, pieces = bridge.plan()
    place = model if model is not None else None if found is None else found[0]
    fills = fills_of_checkpoint(source, parameters, place)
    return folder, assembled(folder, pieces, fills, dtype)


def _origin(source: CheckpointSource, checkpoint: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Return path and revision that ``HuggingFaceModule`` recorded in a checkpoint."""
    settings = source.state().get("hyper_parameters", {})
    if not isinstance(settings.get("path"), str):
        raise CheckpointError(
            f"{checkpoint} does not say which folder its model was started from. Name the folder: "
            "--like FOLDER."
        )
    return settings["path"], settings.get("revision")
