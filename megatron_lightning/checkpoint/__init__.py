"""Sharded checkpoints: save under any layout, load under any other; atomic, checksummed, no unrestricted pickle.

A checkpoint is a directory (``manifest`` describes it byte by byte)::

    manifest.json                       what there is; its presence is the commit
    tensors.<id>.<rank>.<n>.safetensors  rectangles of tensors, written by one rank
    state.<id>.pt                       everything that is not a large tensor; loads with weights_only=True
"""

from typing import TYPE_CHECKING

from megatron_lightning._lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lightning.checkpoint.commit import is_committed, remove_checkpoint
    from megatron_lightning.checkpoint.consolidation import consolidate, read_full
    from megatron_lightning.checkpoint.sharded import TensorShards, is_writer, load_sharded, save_sharded
    from megatron_lightning.checkpoint.source import CheckpointSource, open_checkpoint

__all__ = [
    "CheckpointSource",
    "TensorShards",
    "consolidate",
    "is_committed",
    "is_writer",
    "load_sharded",
    "open_checkpoint",
    "read_full",
    "remove_checkpoint",
    "save_sharded",
]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "CheckpointSource": "megatron_lightning.checkpoint.source",
        "TensorShards": "megatron_lightning.checkpoint.sharded",
        "consolidate": "megatron_lightning.checkpoint.consolidation",
        "is_committed": "megatron_lightning.checkpoint.commit",
        "is_writer": "megatron_lightning.checkpoint.sharded",
        "load_sharded": "megatron_lightning.checkpoint.sharded",
        "open_checkpoint": "megatron_lightning.checkpoint.source",
        "read_full": "megatron_lightning.checkpoint.consolidation",
        "remove_checkpoint": "megatron_lightning.checkpoint.commit",
        "save_sharded": "megatron_lightning.checkpoint.sharded",
    },
)
