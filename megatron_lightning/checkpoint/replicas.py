"""Divide the reading and writing of tensors among the ranks of the same shards."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from megatron_lightning.parallel.shards.spec import Shard, shard_range
from megatron_lightning.parallel.shards.tensor_shards import TensorShards

MIN_SPLIT_BYTES = 4 << 20
"""Shards up to this size are not split among replicas."""


def divide_shard(name: str, shard: Shard, num_replicas: int) -> Iterator[tuple[int, Shard]]:
    """Divide a shard among the replicas: yield (replica, slice of the replica).

    The answer depends only on the arguments, so all ranks agree without communication. A small
    shard goes to a single replica, chosen by the tensor's name: many small shards are spread
    evenly.
    """
    offset, data = shard
    first = zlib.crc32(name.encode()) % num_replicas
    # Slices of a contiguous shard are contiguous.
    dim = next((dim for dim, n in enumerate(data.shape) if n > 1), None)
    num_slices = min(num_replicas, -(-data.nbytes // MIN_SPLIT_BYTES))
    if dim is None or num_slices <= 1:
        yield first, shard
        return
    for turn in range(num_slices):
        start, length = shard_range(data.shape[dim], num_slices, turn)
        if length:
            at = (*offset[:dim], offset[dim] + start, *offset[dim + 1 :])
            yield (first + turn) % num_replicas, Shard(at, data.narrow(dim, start, length))


def written_shards(tensor: TensorShards) -> list[tuple[str, Shard]]:
    """Return the (name, shard) pairs of a tensor to write on this rank."""
    if not tensor.writes:
        return []
    group = tensor.replicas
    return [
        (tensor.name, part)
        for shard in tensor.shards
        for replica, part in divide_shard(tensor.name, shard, group.size)
        if replica == group.rank
    ]
