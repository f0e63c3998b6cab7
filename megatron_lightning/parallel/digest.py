"""A digest of tensors, independent of the tensors' layout and precision.

Every element adds a hash of the element's value in bf16 and index in the global tensor, modulo
2^64: ranks add the hashes of their shards, in any order. The digest detects confused weights, and
is no protection against forgery.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from megatron_lightning.parallel.spec import Shape, Shard, ShardSpec
from megatron_lightning.parallel.tensor_shards import TensorShards

_CHUNK = 1 << 22
"""Elements to hash at a time."""
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 divided by the golden ratio, as a signed number


def digest_of_shards(tensors: Iterable[TensorShards]) -> int:
    """Return the contribution of this rank's shards to the digest. Of replicas, only the first
    contributes.
    """
    return sum(
        _sum(tensor.name, tensor.global_shape, tensor.shards)
        for tensor in tensors
        if tensor.writes and tensor.replicas.rank <= 0
    )


def digest_of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Return the digest of full tensors by name."""
    return sum(
        _sum(name, tuple(tensor.shape), ShardSpec.replicated(tensor.shape).shards(tensor.detach()))
        for name, tensor in tensors
    )


def as_text(total: int, kind: str) -> str:
    """Return a digest as text. ``kind``: origin of the hashed names, such as "gpt"."""
    return f"{kind}:{total & (1 << 64) - 1:016x}"


def _sum(name: str, shape: Shape, shards: Sequence[Shard]) -> int:
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    key = int.from_bytes(hashlib.sha256(f"{name}{shape}".encode()).digest()[:8], "little") | 1
    total = 0
    device = shards[0].data.device if shards else torch.device("cpu")
    for shard in shards:
        first = sum(o * s for o, s in zip(shard.offset, strides, strict=True))
        rows = shard.data if shard.data.dim() else shard.data[None]
        per_row = max(1, prod(rows.shape[1:]))
        for start in range(0, len(rows), max(1, _CHUNK // per_row)):
            part = rows[start : start + max(1, _CHUNK // per_row)]
            places = torch.full((), first, dtype=torch.int64, device=device)
            for dim, stride in enumerate(strides):
                begin = start if dim == 0 else 0
                steps = torch.arange(begin, begin + part.shape[dim], device=device) * stride
                places = places.unsqueeze(-1) + steps
            total += int(_hashes(part, places.view(part.shape)).sum())
    return (total * key) & (1 << 64) - 1


def _hashes(values: Tensor, places: Tensor) -> Tensor:
    """Return a hash of each value and index."""
    bits = values.to(torch.bfloat16).view(torch.int16).to(torch.int64)
    mixed = (bits * 65537 + places * 2 + 1) * _MIX
    return (mixed ^ (mixed >> 29)) * _MIX
