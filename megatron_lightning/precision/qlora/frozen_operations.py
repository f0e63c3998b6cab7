"""Operations on a frozen weight's memory: moves, divisions and copies, without values.

A handler returns ``NotImplemented`` where the operation needs the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch

from megatron_lightning.parallel.shards.stored_weight import StoredWeight
from megatron_lightning.precision.recipes import BLOCK_SIZES

if TYPE_CHECKING:
    from megatron_lightning.precision.qlora.frozen_weight import FrozenWeight

_aten = torch.ops.aten


def _moved(weight: FrozenWeight, func: Any, *args: Any, **kwargs: Any) -> FrozenWeight:
    memory = weight.memory.map(lambda x: func(x, *args, **kwargs))
    return weight.with_memory(memory, shape=weight.shape)


def _detach(weight: FrozenWeight) -> FrozenWeight:
    return _moved(weight, torch.Tensor.detach)


def _clone(weight: FrozenWeight, *, memory_format: Any = None) -> FrozenWeight:
    return _moved(weight, torch.clone)


def _to(weight: FrozenWeight, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    """Move to a device, or change the dtype of the values. The quantized data stay."""
    for name in ("layout", "memory_format", "pin_memory"):
        options.pop(name, None)
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    memory = weight.memory.map(lambda x: x.to(device=device or x.device, **options))
    return weight.with_memory(memory, shape=weight.shape, dtype=dtype)


def _slice(
    weight: FrozenWeight,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    dim %= weight.dim()
    first, last, _ = slice(start, end).indices(weight.shape[dim])
    if step != 1 or weight.memory.data.dim() != weight.dim():
        return NotImplemented
    if dim < weight.dim() - 1:
        return weight.with_memory(
            weight.memory.map(lambda x: x.narrow(dim, first, max(0, last - first)))
        )
    columns, size = weight.shape[-1], BLOCK_SIZES[weight.format]
    if (first, last) == (0, columns):
        return _detach(weight)
    if first % size or (last % size and last != columns):
        return NotImplemented
    return weight.with_memory(weight.memory.columns(weight.format, first, last))


def _select(weight: FrozenWeight, dim: int, index: int) -> Any:
    """Return the matrix of one expert."""
    memory = weight.memory
    if dim % weight.dim() >= weight.dim() - 2 or memory.data.dim() != weight.dim():
        return NotImplemented
    return weight.with_memory(memory.map(lambda x: x.select(dim % weight.dim(), index)))


def _split(weight: FrozenWeight, size: int, dim: int = 0) -> Any:
    steps = range(0, weight.shape[dim], size)
    slices = [_slice(weight, dim, start, start + size) for start in steps]
    return NotImplemented if any(part is NotImplemented for part in slices) else slices


def _view(weight: FrozenWeight, shape: Sequence[int]) -> Any:
    sizes = list(shape)
    if -1 in sizes:
        num_others = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = weight.numel() // max(1, num_others)
    if tuple(sizes) == tuple(weight.shape):
        return _detach(weight)
    if len(sizes) == 1:  # FSDP2's flat shard
        return weight.with_memory(weight.memory, shape=sizes)
    return NotImplemented


def _as_strided(
    weight: FrozenWeight, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Any:
    is_same = tuple(size) == tuple(weight.shape) and tuple(stride) == weight.stride() and not offset
    return _detach(weight) if is_same else NotImplemented


def _new(weight: FrozenWeight, size: Sequence[int], **options: Any) -> Any:
    dtype, device = options.get("dtype"), options.get("device")
    if not size or dtype not in (None, weight.dtype):
        return NotImplemented
    return type(weight).empty(weight.format, size, weight.dtype, device or weight.device)


def _empty_like(weight: FrozenWeight, **options: Any) -> Any:
    return _new(weight, weight.shape, **options)


def _copy(target: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(target, StoredWeight):
        return target.copy_(source.dequantized() if isinstance(source, StoredWeight) else source)
    if not isinstance(source, StoredWeight):
        if source.shape != target.shape:
            return NotImplemented
        target.write(source)
        target.original.total = None
        return target
    return _copy_memory(cast("FrozenWeight", target), cast("FrozenWeight", source), non_blocking)


def _copy_memory(target: FrozenWeight, source: FrozenWeight, non_blocking: bool) -> Any:
    if source.format != target.format or source.shape != target.shape:
        return NotImplemented
    for values, new_values in zip(target.memory.tensors, source.memory.tensors, strict=True):
        values.copy_(new_values, non_blocking=non_blocking)
    target.original.total = source.original.total
    target.original.is_full = source.original.is_full
    return target


def _is_pinned(weight: FrozenWeight, device: Any = None) -> bool:
    return weight.memory.data.is_pinned()


HANDLERS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        _aten.detach.default: _detach,
        _aten.alias.default: _detach,
        _aten.clone.default: _clone,
        _aten._to_copy.default: _to,
        _aten.slice.Tensor: _slice,
        _aten.select.int: _select,
        _aten.split.Tensor: _split,
        _aten.view.default: _view,
        _aten.as_strided.default: _as_strided,
        _aten.new_empty.default: _new,
        _aten.new_zeros.default: _new,
        _aten.empty_like.default: _empty_like,
        _aten.zeros_like.default: _empty_like,
        _aten.copy_.default: _copy,
        _aten.is_pinned.default: _is_pinned,
    }
)
"""ATen operation -> handler."""
