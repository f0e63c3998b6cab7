"""A checkpoint with further tensors, which are in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from megatron_lightning.checkpoint.manifest import TensorInfo
from megatron_lightning.checkpoint.source import CheckpointSource
from megatron_lightning.parallel.spec import Shard


class MemorySource:
    """Wrap a source to have full tensors from memory beside its own.

    Args:
        source: The checkpoint.
        tensors: Global name -> full tensor, in place of one of the checkpoint.
    """

    def __init__(self, source: CheckpointSource, tensors: Mapping[str, Tensor]) -> None:
        self._source = source
        self._tensors = tensors

    def tensors(self) -> Mapping[str, TensorInfo]:
        """See :class:`CheckpointSource`."""
        more = {n: TensorInfo(tuple(t.shape), t.dtype) for n, t in self._tensors.items()}
        return {**self._source.tensors(), **more}

    def state(self) -> dict[str, Any]:
        """See :class:`CheckpointSource`."""
        return self._source.state()

    def read(self, shards: Iterable[tuple[str, Shard]]) -> None:
        """See :class:`CheckpointSource`."""
        stored = []
        for name, shard in shards:
            if name in self._tensors:
                shard.data.copy_(self._tensors[name].detach()[shard.box.slices])
            else:
                stored.append((name, shard))
        if stored:
            self._source.read(stored)
