"""Sharded checkpoints: save under any layout, load under any other. Atomic, checksummed, without
unrestricted pickle.

A checkpoint is a directory (``manifest`` describes it byte by byte)::

    manifest.json                       the list of contents; its presence is the commit
    tensors.<id>.<rank>.<n>.safetensors boxes of tensors, written by one rank
    state.<id>.pt                       the rest of the state; loads with weights_only=True
"""

from typing import TYPE_CHECKING

from megatron_lightning._lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lightning.checkpoint.reading.loading import load_sharded
    from megatron_lightning.checkpoint.reading.source import CheckpointSource, open_checkpoint
    from megatron_lightning.checkpoint.tools.consolidation import consolidate, plain_file, read_full
    from megatron_lightning.checkpoint.writing.commit import is_committed, remove_checkpoint
    from megatron_lightning.checkpoint.writing.saving import save_sharded
    from megatron_lightning.parallel.shards.tensor_shards import TensorShards

__all__ = [
    "CheckpointSource",
    "TensorShards",
    "consolidate",
    "is_committed",
    "load_sharded",
    "open_checkpoint",
    "plain_file",
    "read_full",
    "remove_checkpoint",
    "save_sharded",
]

lazy_attributes(
    __name__,
    {
        "CheckpointSource": "megatron_lightning.checkpoint.reading.source",
        "TensorShards": "megatron_lightning.parallel.shards.tensor_shards",
        "consolidate": "megatron_lightning.checkpoint.tools.consolidation",
        "is_committed": "megatron_lightning.checkpoint.writing.commit",
        "load_sharded": "megatron_lightning.checkpoint.reading.loading",
        "open_checkpoint": "megatron_lightning.checkpoint.reading.source",
        "plain_file": "megatron_lightning.checkpoint.tools.consolidation",
        "read_full": "megatron_lightning.checkpoint.tools.consolidation",
        "remove_checkpoint": "megatron_lightning.checkpoint.writing.commit",
        "save_sharded": "megatron_lightning.checkpoint.writing.saving",
    },
)
