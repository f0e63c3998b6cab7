"""Weights quantized while they are read from a folder: a rank never holds more values than its
shard of one parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_lightning.assembly.state.module_shards import ModuleState
from megatron_lightning.bridge.tensors.lazy import Lazy
from megatron_lightning.parallel.collectives import all_reduce
from megatron_lightning.parallel.shards.digest import hash_of_shards
from megatron_lightning.parallel.shards.spec import Box, Shard, ShardSpec
from megatron_lightning.parallel.shards.stored_weight import StoredWeight


def read_stored(state: ModuleState, name: str, tensor: Tensor, lazy: Lazy) -> int:
    """Fill this rank's shard of a stored weight. A collective of the ranks with shards of the
    weight. Return the number of bytes read.
    """
    described = state.shards(name, name, tensor)
    shards = [shard for shard in described.shards if shard.data.numel()]
    values = [_read(lazy, shard) for shard in shards]
    targets = [shard.data for shard in shards if isinstance(shard.data, StoredWeight)]
    common: dict[Box, Tensor] = {}
    for shard, target, value in zip(shards, targets, values, strict=True):
        amax = target.common_amax(value)
        if amax is not None:
            key = _matrices(shard)
            common[key] = torch.maximum(common[key], amax) if key in common else amax
    for key, amax in common.items():
        common[key] = _over_ranks(amax, state, state.spec(name, tensor), tensor)
    for shard, target, value in zip(shards, targets, values, strict=True):
        target.write(value, common.get(_matrices(shard)))
    if targets:
        boxes = [Shard(s.offset, v) for s, v in zip(shards, values, strict=True)]
        targets[0].original.add(hash_of_shards(described.global_shape, boxes))
    return sum(value.nbytes for value in values)


def _read(lazy: Lazy, shard: Shard) -> Tensor:
    values = torch.empty(shard.data.shape, dtype=shard.data.dtype, device=shard.data.device)
    lazy.fill(shard.box, values)
    return values


def _matrices(shard: Shard) -> Box:
    """Return the range of the matrices, without rows and columns."""
    return Box(shard.offset[:-2], tuple(shard.data.shape[:-2]))


def _over_ranks(amax: Tensor, state: ModuleState, spec: ShardSpec, tensor: Tensor) -> Tensor:
    """Return the amax over the ranks with shards of the same matrices."""
    for axis in spec.sharded_over:
        if axis != "ep":  # other matrices
            amax = all_reduce(amax, state.context.axis(axis), "max")
    units = state.part.units
    if isinstance(tensor, DTensor) and units is not None:
        [placement] = tensor.placements
        if getattr(placement, "dim", 0) == tensor.dim() - 2:
            amax = all_reduce(amax, units.groups[spec.data_axes].shard, "max")
    return amax
