"""A frozen weight as quantized data and scales, in the form of a tensor.

The memory is described in :mod:`megatron_lightning.precision.qlora.frozen_memory`. A shard of rows
holds the quantized data of the full weight, bit by bit, and so does a shard of columns whose bounds
are bounds of blocks.

Operations on the weight act on data and scales if they only move or divide the weight
(:mod:`megatron_lightning.precision.qlora.frozen_operations`). ``F.linear`` multiplies by
:func:`~megatron_lightning.layers.linear.gemm.matmul`, so that backward keeps no values. All other
operations see the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only
from typing_extensions import Self

from megatron_lightning.errors import ConfigError, ShardingError
from megatron_lightning.layers.linear.gemm import Gemm, matmul
from megatron_lightning.parallel.shards.digest import hash_of
from megatron_lightning.parallel.shards.stored_weight import Original, StoredWeight
from megatron_lightning.precision.qlora.base_formats import BaseFormat
from megatron_lightning.precision.qlora.frozen_memory import FrozenMemory
from megatron_lightning.precision.qlora.frozen_operations import HANDLERS
from megatron_lightning.precision.recipes import BLOCK_SIZES
from megatron_lightning.precision.scaling import amax_of_matrices


class FrozenWeight(StoredWeight):
    """A frozen weight [..., R, C] of a format.

    Args:
        memory: Quantized data and scales.
        name: The format.
        shape: Shape of the weight.
        dtype: Dtype of the values, unless a GEMM asks for another.
        original: Hash of the values before.
    """

    memory: FrozenMemory
    format: BaseFormat

    @staticmethod
    def __new__(  # noqa: PLR0917 (torch passes by position)
        cls,
        memory: FrozenMemory,
        name: BaseFormat,
        shape: Sequence[int],
        dtype: torch.dtype,
        original: Original | None = None,
    ) -> FrozenWeight:
        """Return the tensor around ``memory``."""
        weight: FrozenWeight = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=memory.data.device, requires_grad=False
        )
        weight.memory = memory
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
        memory = FrozenMemory.zeros(name, shape, device)
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
        self.memory.write(self.format, values, amax)

    @torch.no_grad()
    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """See the base class. Rounded to the weight's dtype first, as a stored weight is."""
        values = self.memory.read(self.format, self.dtype).view(self.shape)
        return values.to(self.dtype if dtype is None else dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of quantized data and scales."""
        return sum(tensor.nbytes for tensor in self.memory.tensors)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        kind = str(self.dtype).removeprefix("torch.")
        return f"FrozenWeight({self.format}, {tuple(self.shape)}, {kind}, {self.device})"

    # ------------------------------------------------------------------------------------ protocols

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = ["_data", "_scales", "_row_scales"][: len(self.memory.tensors)]
        return names, (self.format, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, shape: Any, stride: Any
    ) -> FrozenWeight:
        name, dtype = context
        memory = FrozenMemory(inner["_data"], inner["_scales"], inner.get("_row_scales"))
        return FrozenWeight(memory, name, shape, dtype)

    @property
    def _data(self) -> Tensor:
        return self.memory.data

    @property
    def _scales(self) -> Tensor:
        return self.memory.scales

    @property
    def _row_scales(self) -> Tensor | None:
        return self.memory.row_scales

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (tuple(self.memory), self.format, tuple(self.shape), self.dtype)

    def __deepcopy__(self, memo: Any) -> Any:
        copy: Any = self.with_memory(self.memory.map(torch.clone), shape=self.shape)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=False)
        memo[id(self)] = copy
        return copy

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return quantized data and scales for FSDP2's all-gather."""
        return tuple(self.memory.tensors), outer_size

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
        memory = FrozenMemory(*outputs, *([None] if len(outputs) < 3 else []))
        return FrozenWeight(memory, self.format, metadata, self.dtype), ()

    def with_memory(
        self,
        memory: FrozenMemory,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        original: Original | None = None,
    ) -> FrozenWeight:
        """Return a weight with other memory."""
        if shape is None:
            shape = (*memory.data.shape[:-1], memory.num_columns(self.format))
        original_shape = self.original if original is None else original
        return FrozenWeight(memory, self.format, shape, dtype or self.dtype, original_shape)

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
        handler = HANDLERS.get(func)
        if handler is not None:
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        targets = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if any(isinstance(value, FrozenWeight) for value in targets):
            raise ConfigError(
                f"a frozen weight is kept as quantized data, and {func} would write values into "
                "it. Train adapters beside it, or set base of LoRA to None."
            )
        args, kwargs = tree_map_only(FrozenWeight, lambda w: w.dequantized(), (args, kwargs))
        return func(*args, **kwargs)


def _rebuilt(memory: Any, name: Any, shape: Any, dtype: Any) -> FrozenWeight:
    return FrozenWeight(FrozenMemory(*memory), name, shape, dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return matmul(x, weight, bias, Gemm())
