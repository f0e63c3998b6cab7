"""Tensors of a checkpoint, read at the first computation.

During the load of a checkpoint, hooks see stored tensors in place of the module's tensors: with the
names, shapes and dtypes of one device, although every rank reads only the rank's shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron_lightning.checkpoint.reading.source import CheckpointSource
from megatron_lightning.parallel.shards.spec import Shard

_ASKED = {
    getattr(Tensor, name).__get__
    for name in (
        *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_meta", "is_cuda"),
        *("is_sparse", "is_quantized", "is_nested", "is_leaf", "grad", "grad_fn", "nbytes"),
    )
} | {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex),
    *(Tensor.stride, Tensor.is_contiguous, Tensor.element_size, Tensor.nelement, Tensor.get_device),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}


class StoredTensor(Tensor):
    """A full tensor of a checkpoint, on the CPU. The first operation reads the full tensor.

    Operations in place change this tensor, not the checkpoint.
    """

    source: CheckpointSource
    """The checkpoint."""
    stored: str
    """Name of the tensor in the checkpoint."""
    value: Tensor | None
    """The full tensor, after the first read."""

    @classmethod
    def of(cls, source: CheckpointSource, stored: str) -> StoredTensor:
        """Represent the tensor named ``stored``."""
        info = source.tensors()[stored]
        cpu = torch.device("cpu")
        tensor: StoredTensor = Tensor._make_wrapper_subclass(
            cls, info.shape, dtype=info.dtype, device=cpu
        )
        tensor.source, tensor.stored, tensor.value = source, stored, None
        return tensor

    def full(self) -> Tensor:
        """Return the full tensor. No collective."""
        if self.value is None:
            value = torch.empty(tuple(self.shape), dtype=self.dtype)
            if value.numel():
                self.source.read([(self.stored, Shard((0,) * value.dim(), value))])
            self.value = value
        return self.value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # called by torch
        if func in _ASKED:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        args, kwargs = tree_map_only(StoredTensor, cls.full, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # called by torch's own code in C++
        args, kwargs = tree_map_only(StoredTensor, cls.full, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return (
            StoredTensor.of(self.source, self.stored) if self.value is None else self.value.clone()
        )
