"""A frozen weight as quantized data and scales, in the form of a tensor.

Shapes: a weight [..., R, C], in the blocks of :func:`~megatron_lightning.precision.quantize` with
the recipe's defaults: each scale belongs to neighboring values of one row.

    format     data                     scales                        row scales
    blockwise  uint8 [..., R, C]        fp32 [..., R, ceil(C / 128)]
    mxfp8      uint8 [..., R, C]        uint8 [..., R, ceil(C / 32)]
    nvfp4      uint8 [..., R, C / 2]    uint8 [..., R, ceil(C / 16)]  fp32 [..., R, 1]

Data and scales are bytes of e4m3, e8m0 and packed e2m1, since gloo and views of FSDP2 know no
floats of 8 bits. With nvfp4 all rows of a matrix have the matrix's scale, so that rows can be
divided. A shard of rows therefore holds the quantized data of the full weight, bit by bit, and so
does a shard of columns whose bounds are bounds of blocks.

Operations on the weight act on data and scales if they only move or divide the weight. ``F.linear``
multiplies by :func:`~megatron_lightning.layers.gemm.matmul`, so that backward keeps no values. All
other operations see the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only
from typing_extensions import Self

from megatron_lightning.errors import ConfigError, ShardingError
from megatron_lightning.layers.gemm import Gemm, matmul
from megatron_lightning.parallel.digest import hash_of
from megatron_lightning.parallel.stored_weight import Original, StoredWeight
from megatron_lightning.precision.formats import pack_e2m1, unpack_e2m1
from megatron_lightning.precision.quantization import TwoLevelScales, encode
from megatron_lightning.precision.recipes import BLOCK_SIZES, FP8Recipe
from megatron_lightning.precision.scaling import Block, amax_of_matrices, values_of

BaseFormat = Literal["blockwise", "mxfp8", "nvfp4"]
_CHUNK, _CHUNK_OF_GPU = 1 << 18, 1 << 24
"""Values to convert at a time: in caches of a CPU, in few launches on a GPU. In between a value
takes about 30 bytes."""
_aten = torch.ops.aten
_T = TypeVar("_T")


class _Memory(NamedTuple):
    data: Tensor
    scales: Tensor
    row_scales: Tensor | None

    def map(self, change: Callable[[Tensor], Tensor]) -> _Memory:
        rows = None if self.row_scales is None else change(self.row_scales)
        return _Memory(change(self.data), change(self.scales), rows)

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in self if tensor is not None]


class FrozenWeight(StoredWeight):
    """A frozen weight [..., R, C] of a format.

    Args:
        memory: Quantized data and scales.
        name: The format.
        shape: Shape of the weight.
        dtype: Dtype of the values, unless a GEMM asks for another.
        original: Hash of the values before.
    """

    _memory: _Memory
    format: BaseFormat

    @staticmethod
    def __new__(  # noqa: PLR0917 (torch passes by position)
        cls,
        memory: _Memory,
        name: BaseFormat,
        shape: Sequence[int],
        dtype: torch.dtype,
        original: Original | None = None,
    ) -> FrozenWeight:
        """Return the tensor around ``memory``."""
        weight: FrozenWeight = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=memory.data.device, requires_grad=False
        )
        weight._memory = memory
        weight.format = name
        weight.original = Original() if original is None else original
        return weight

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def empty(
        cls,
        name: BaseFormat,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> FrozenWeight:
        """Return a weight with zeros.

        Raises:
            ConfigError: If a row cannot be packed.
        """
        *rows, columns = shape
        if name == "nvfp4" and columns % 2:
            raise ConfigError(
                f"a weight of shape {tuple(shape)} has {columns} columns, and two values of nvfp4 "
                "share a byte. Set base to mxfp8 or blockwise."
            )
        num_scales = -(-columns // BLOCK_SIZES[name])
        width = columns // 2 if name == "nvfp4" else columns
        kind = torch.float32 if name == "blockwise" else torch.uint8
        memory = _Memory(
            torch.zeros(*rows, width, dtype=torch.uint8, device=device),
            torch.zeros(*rows, num_scales, dtype=kind, device=device),
            torch.zeros(*rows, 1, device=device) if name == "nvfp4" else None,
        )
        return cls(memory, name, shape, dtype)

    @classmethod
    @torch.no_grad()
    def quantize(cls, values: Tensor, name: BaseFormat) -> FrozenWeight:
        """Return the full weight ``values`` [..., R, C] in a format."""
        weight = cls.empty(name, values.shape, values.dtype, values.device)
        if not values.is_meta:
            weight.write(values, weight.common_amax(values))
            weight.original.set_full(hash_of(values))
        return weight

    # ------------------------------------------------------------------------------------- contents

    def check_columns(self, first: int, size: int) -> None:
        """See the base class."""
        block, last = BLOCK_SIZES[self.format], first + size
        if first % block or (last % block and last != self.shape[-1]):
            raise ShardingError(
                f"a rank is to hold the columns {first} to {last - 1} of a weight of shape "
                f"{tuple(self.shape)}, and base={self.format!r} keeps {block} columns with a "
                "common scale. Set tensor_model_parallel_size so that every rank has a multiple of "
                f"{block} input features, or another base of LoRA."
            )

    def common_amax(self, values: Tensor) -> Tensor | None:
        """See the base class."""
        return amax_of_matrices(values) if self.format == "nvfp4" else None

    def stored(self, full: Tensor) -> Self:
        """See the base class."""
        return type(self).quantize(full.to(self.dtype), self.format)  # type: ignore[return-value]

    @torch.no_grad()
    def write(self, values: Tensor, amax: Tensor | None = None) -> None:
        """See the base class."""
        if amax is None:
            amax = self.common_amax(values)
        columns, recipe = self.shape[-1], _recipe(self.format)
        block = Block(1, BLOCK_SIZES[self.format])
        per_row = None if amax is None else amax.expand(*values.shape[:-1], 1).reshape(-1, 1)
        rows = values.reshape(-1, columns)
        targets = self._memory.map(lambda x: x.view(-1, x.shape[-1]))
        for chunk in _row_chunks(rows):
            shared = None if per_row is None else per_row[chunk]
            data, scales = encode(rows[chunk], recipe, "input", block, shared_amax=shared)
            if isinstance(scales, TwoLevelScales):
                data = pack_e2m1(data)
                if targets.row_scales is not None:
                    targets.row_scales[chunk] = scales.tensor
                scales = scales.blocks
            targets.data[chunk] = data.view(torch.uint8)
            targets.scales[chunk] = (
                scales if scales.dtype.itemsize > 1 else scales.view(torch.uint8)
            )

    @torch.no_grad()
    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """See the base class. Rounded to the weight's dtype first, as a stored weight is."""
        columns = self._columns
        out = torch.empty(
            math.prod(self.shape) // max(1, columns), columns, dtype=self.dtype, device=self.device
        )
        memory = self._memory.map(lambda x: x.reshape(-1, x.shape[-1]))
        for chunk in _row_chunks(out):
            out[chunk] = self._decoded(memory.map(lambda x, chunk=chunk: x[chunk]), columns)  # type: ignore[misc]
        return out.view(self.shape).to(self.dtype if dtype is None else dtype)

    def _decoded(self, memory: _Memory, columns: int) -> Tensor:
        """Return fp32 values [r, C] of rows."""
        data, scales, row_scales = memory
        block = Block(1, BLOCK_SIZES[self.format])
        if row_scales is not None:
            factors = scales.view(torch.float8_e4m3fn).float() * row_scales
            return values_of(unpack_e2m1(data, columns), factors, block)
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        return values_of(data.view(torch.float8_e4m3fn), scales.float(), block)

    @property
    def _columns(self) -> int:
        return self._memory.data.shape[-1] * (2 if self.format == "nvfp4" else 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of quantized data and scales."""
        return sum(tensor.nbytes for tensor in self._memory.tensors)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        kind = str(self.dtype).removeprefix("torch.")
        return f"FrozenWeight({self.format}, {tuple(self.shape)}, {kind}, {self.device})"

    # ------------------------------------------------------------------------------------ protocols

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = ["_data", "_scales", "_row_scales"][: len(self._memory.tensors)]
        return names, (self.format, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, shape: Any, stride: Any
    ) -> FrozenWeight:
        name, dtype = context
        memory = _Memory(inner["_data"], inner["_scales"], inner.get("_row_scales"))
        return FrozenWeight(memory, name, shape, dtype)

    @property
    def _data(self) -> Tensor:
        return self._memory.data

    @property
    def _scales(self) -> Tensor:
        return self._memory.scales

    @property
    def _row_scales(self) -> Tensor | None:
        return self._memory.row_scales

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (tuple(self._memory), self.format, tuple(self.shape), self.dtype)

    def __deepcopy__(self, memo: Any) -> Any:
        copy: Any = self._with(self._memory.map(torch.clone), shape=self.shape)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=False)
        memo[id(self)] = copy
        return copy

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return what FSDP2 gathers: quantized data and scales."""
        return tuple(self._memory.tensors), outer_size

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the full weight around gathered memory. Later gathers write into the same
        memory.
        """
        if out is not None:
            return None
        memory = _Memory(*outputs, *([None] if len(outputs) < 3 else []))
        return FrozenWeight(memory, self.format, metadata, self.dtype), ()

    def _with(
        self,
        memory: _Memory,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        original: Original | None = None,
    ) -> FrozenWeight:
        """Return a weight with other memory."""
        if shape is None:
            columns = memory.data.shape[-1] * (2 if self.format == "nvfp4" else 1)
            shape = (*memory.data.shape[:-1], columns)
        shared = self.original if original is None else original
        return FrozenWeight(memory, self.format, shape, dtype or self.dtype, shared)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if any(isinstance(value, FrozenWeight) for value in written):
            raise ConfigError(
                f"a frozen weight is kept as quantized data, and {func} would write values into "
                "it. Train adapters beside it, or set base of LoRA to None."
            )
        args, kwargs = tree_map_only(FrozenWeight, lambda w: w.dequantized(), (args, kwargs))
        return func(*args, **kwargs)


def _rebuilt(memory: Any, name: Any, shape: Any, dtype: Any) -> FrozenWeight:
    return FrozenWeight(_Memory(*memory), name, shape, dtype)


def _recipe(name: BaseFormat) -> FP8Recipe:
    return FP8Recipe(scaling=name)


def _row_chunks(rows: Tensor) -> list[slice]:
    """Return slices of the rows of a matrix to convert at a time."""
    size = _CHUNK_OF_GPU if rows.is_cuda else _CHUNK
    step = max(1, size // max(1, rows.shape[1]))
    return [slice(start, start + step) for start in range(0, len(rows), step)]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return matmul(x, weight, bias, Gemm())


# ------------------------------------------------------------------------------------- operations


def _moved(weight: FrozenWeight, func: Any, *args: Any, **kwargs: Any) -> FrozenWeight:
    memory = weight._memory.map(lambda x: func(x, *args, **kwargs))
    return weight._with(memory, shape=weight.shape)


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
    memory = weight._memory.map(lambda x: x.to(device=device or x.device, **options))
    return weight._with(memory, shape=weight.shape, dtype=dtype)


def _slice(
    weight: FrozenWeight,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    dim %= weight.dim()
    first, last, _ = slice(start, end).indices(weight.shape[dim])
    if step != 1 or weight._memory.data.dim() != weight.dim():
        return NotImplemented
    if dim < weight.dim() - 1:
        return weight._with(
            weight._memory.map(lambda x: x.narrow(dim, first, max(0, last - first)))
        )
    columns, size = weight.shape[-1], BLOCK_SIZES[weight.format]
    if (first, last) == (0, columns):
        return _detach(weight)
    if first % size or (last % size and last != columns):
        return NotImplemented
    width = 2 if weight.format == "nvfp4" else 1
    return weight._with(
        _Memory(
            weight._memory.data[..., first // width : last // width],
            weight._memory.scales[..., first // size : -(-last // size)],
            weight._memory.row_scales,
        )
    )


def _split(weight: FrozenWeight, size: int, dim: int = 0) -> Any:
    steps = range(0, weight.shape[dim], size)
    return [_slice(weight, dim, start, start + size) for start in steps]


def _view(weight: FrozenWeight, shape: Sequence[int]) -> Any:
    sizes = list(shape)
    if -1 in sizes:
        others = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = weight.numel() // max(1, others)
    if tuple(sizes) == tuple(weight.shape):
        return _detach(weight)
    if len(sizes) == 1:  # FSDP2's flat shard
        return weight._with(weight._memory, shape=sizes)
    return NotImplemented


def _as_strided(
    weight: FrozenWeight, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Any:
    same = tuple(size) == tuple(weight.shape) and tuple(stride) == weight.stride() and not offset
    return _detach(weight) if same else NotImplemented


def _new(weight: FrozenWeight, size: Sequence[int], **options: Any) -> Any:
    dtype, device = options.get("dtype"), options.get("device")
    if not size or dtype not in (None, weight.dtype):
        return NotImplemented
    return FrozenWeight.empty(weight.format, size, weight.dtype, device or weight.device)


def _empty_like(weight: FrozenWeight, **options: Any) -> Any:
    return _new(weight, weight.shape, **options)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(target, FrozenWeight):
        return target.copy_(source.dequantized() if isinstance(source, FrozenWeight) else source)
    if not isinstance(source, FrozenWeight):
        if source.shape != target.shape:
            return NotImplemented
        target.write(source)
        target.original.total = None
        return target
    if source.format != target.format or source.shape != target.shape:
        return NotImplemented
    for own, other in zip(target._memory.tensors, source._memory.tensors, strict=True):
        own.copy_(other, non_blocking=non_blocking)
    target.original.total = source.original.total
    target.original.is_full = source.original.is_full
    return target


def _is_pinned(weight: FrozenWeight, device: Any = None) -> bool:
    return weight._memory.data.is_pinned()


_HANDLERS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        _aten.detach.default: _detach,
        _aten.alias.default: _detach,
        _aten.clone.default: _clone,
        _aten._to_copy.default: _to,
        _aten.slice.Tensor: _slice,
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
