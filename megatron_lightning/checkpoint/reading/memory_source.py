"""A checkpoint with added or replaced tensors in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from megatron_lightning.checkpoint.format.manifest import TensorInfo
from megatron_lightning.checkpoint.reading.source import CheckpointSource
from megatron_lightning.checkpoint.reading.stored_tensor import StoredTensor
from megatron_lightning.parallel.shards.spec import Shard


class MemorySource:
    """Wrap a source to add or replace full tensors.

    Args:
        source: The checkpoint. None: no checkpoint.
        tensors: Global name -> full tensor. A :class:`StoredTensor` is read from the represented
            checkpoint, under the stored name.
        replaced: Prefix of the checkpoint's tensors to hide. None: no tensor is hidden.
    """

    def __init__(
        self,
        source: CheckpointSource | None,
        tensors: Mapping[str, Tensor],
        *,
        replaced: str | None = None,
    ) -> None:
        self._source = source
        self._tensors = tensors
        self._replaced = replaced

    def tensors(self) -> Mapping[str, TensorInfo]:
        """See :class:`CheckpointSource`."""
        stored = {} if self._source is None else self._source.tensors()
        entries = {
            name: info
            for name, info in stored.items()
            if self._replaced is None or not name.startswith(self._replaced)
        }
        return {
            **entries,
            **{n: TensorInfo(tuple(t.shape), t.dtype) for n, t in self._tensors.items()},
        }

    def state(self) -> dict[str, Any]:
        """See :class:`CheckpointSource`."""
        return {} if self._source is None else self._source.state()

    def read(self, shards: Iterable[tuple[str, Shard]]) -> None:
        """See :class:`CheckpointSource`."""
        stored: dict[int, tuple[CheckpointSource | None, list[tuple[str, Shard]]]] = {}
        for name, shard in shards:
            source, value, place = self._source, self._tensors.get(name), name
            if isinstance(value, StoredTensor) and value.value is None:
                source, place = value.source, value.stored
            elif value is not None:
                shard.data.copy_(value.detach()[shard.box.slices])
                continue
            stored.setdefault(id(source), (source, []))[1].append((place, shard))
        for source, requests in stored.values():
            if source is not None:
                source.read(requests)
