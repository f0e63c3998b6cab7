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

from megatron_lightning.parallel.shards.spec import Shape, Shard, ShardSpec
from megatron_lightning.parallel.shards.stored_weight import StoredWeight
from megatron_lightning.parallel.shards.tensor_shards import TensorShards

_CHUNK = 1 << 19
"""Elements to hash at a time."""
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 divided by the golden ratio, as a signed number


def digest_of_shards(tensors: Iterable[TensorShards]) -> int:
    """Return the contribution of this rank's shards to the digest. Of replicas, only the first
    contributes.
    """
    return sum(
        contribution(tensor.name, tensor.global_shape, _total(tensor))
        for tensor in tensors
        if _contributes(tensor)
    )


def hashes_by_name(tensors: Iterable[TensorShards], *, exact: bool = False) -> dict[str, int]:
    """Return name -> sum of the hashes of this rank's shards. Of replicas, only the first
    contributes.

    Args:
        tensors: Shards of tensors.
        exact: Hash every bit, so that another precision has another hash. False: hash values in
            bf16.
    """
    return {tensor.name: _total(tensor, exact) for tensor in tensors if _contributes(tensor)}


def _contributes(tensor: TensorShards) -> bool:
    return tensor.writes and tensor.replicas.rank <= 0


def _total(tensor: TensorShards, exact: bool = False) -> int:
    stored = tensor.shards[0].data if tensor.shards else None
    if not isinstance(stored, StoredWeight) or stored.original.total is None:
        return hash_of_shards(tensor.global_shape, tensor.shards, exact=exact)
    # The rank with the first element contributes the hash of a full weight.
    is_first = any(not any(shard.offset) for shard in tensor.shards)
    return stored.original.total if is_first or not stored.original.is_full else 0


def digest_of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Return the digest of full tensors by name."""
    return sum(_of_tensor(name, tensor.detach()) for name, tensor in tensors)


def _of_tensor(name: str, tensor: Tensor) -> int:
    return contribution(name, tuple(tensor.shape), hash_of(tensor))


def hash_of(full: Tensor) -> int:
    """Return the sum of hashes of a full tensor, for :func:`contribution`."""
    if isinstance(full, StoredWeight) and full.original.total is not None:
        return full.original.total
    shape = tuple(full.shape)
    return hash_of_shards(shape, ShardSpec.replicated(shape).shards(full.detach()))


def contribution(name: str, shape: Shape, total: int) -> int:
    """Return the contribution of a tensor's shards with a sum of hashes to the digest."""
    key = int.from_bytes(hashlib.sha256(f"{name}{shape}".encode()).digest()[:8], "little") | 1
    return (total * key) & (1 << 64) - 1


def as_text(total: int, kind: str) -> str:
    """Return a digest as text. ``kind``: origin of the hashed names, such as "gpt"."""
    return f"{kind}:{total & (1 << 64) - 1:016x}"


def hash_of_shards(shape: Shape, shards: Sequence[Shard], *, exact: bool = False) -> int:
    """Return the sum of hashes of the shards of a tensor with the global shape ``shape``. For
    ``exact`` see :func:`hashes_by_name`.
    """
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
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
            bits = _bits(part) if exact else _bits(part.to(torch.bfloat16))
            total += int(_hashes(bits, places.view(part.shape)).sum())
    return total


def _bits(values: Tensor) -> Tensor:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]
    return values.contiguous().view(kind).to(torch.int64)


def _hashes(bits: Tensor, places: Tensor) -> Tensor:
    """Return a hash of each value and index."""
    mixed = (bits * 65537 + places * 2 + 1) * _MIX
    return (mixed ^ (mixed >> 29)) * _MIX
