"""From a sharded checkpoint to one plain Lightning ``.ckpt``, in one process."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import torch

from megatron_lightning.checkpoint.naming import OWN, join_tensors, number_optimizer_state
from megatron_lightning.checkpoint.shard_file import Piece
from megatron_lightning.checkpoint.source import open_checkpoint
from megatron_lightning.checkpoint.storage import sync_directory


def read_full(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a whole checkpoint into the nested dict that Lightning knows.

    Args:
        path: A checkpoint directory, whatever the layout it was saved under.

    Returns:
        ``state_dict`` of full tensors, ``optimizer_states`` in torch's own form, loops, callbacks and the rest; all on the CPU.

    Raises:
        CheckpointError: If the checkpoint is incomplete or damaged.
    """
    source = open_checkpoint(path)
    tensors = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in source.tensors().items()}
    source.read([Piece(name, (0,) * tensor.dim(), tensor) for name, tensor in tensors.items() if tensor.numel()])
    checkpoint = join_tensors(tensors, source.state())
    for copy, owner in checkpoint.get(OWN, {}).get("tied", {}).items():  # stored once, under the owner's name
        for values in checkpoint.values():
            if isinstance(values, dict) and isinstance(values.get(owner), torch.Tensor):
                values.setdefault(copy, values[owner])
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [number_optimizer_state(entry) for entry in checkpoint["optimizer_states"]]
    return checkpoint


def consolidate(path: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
    """Write a checkpoint directory as one ``.ckpt`` file that ``load_from_checkpoint`` and a plain Trainer read.

    The file appears under its name only when it is complete.

    Args:
        path: The checkpoint directory.
        output: The file to write; an existing one is replaced.

    Raises:
        CheckpointError: If the checkpoint is incomplete or damaged.
    """
    checkpoint, target = read_full(path), Path(output).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.tmp-{uuid.uuid4().hex[:12]}")
    try:
        with open(temporary, "xb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(target.parent)
