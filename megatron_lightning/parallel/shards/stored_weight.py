"""Frozen weights stored in another form than values: quantized data and scales.

A :class:`StoredWeight` has the shape and dtype of the weight, so that names, shard specs and plans
stay. The subclass in ``precision`` holds the memory. Code that needs values asks for
:meth:`StoredWeight.dequantized`. Code that moves weights moves the :func:`plain_tensors` inside.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from typing_extensions import Self


class Original:
    """Hash of the values that a weight was quantized from, as ``parallel.digest`` adds them up.

    Views and copies of a weight share the object.
    """

    def __init__(self) -> None:
        self.total: int | None = None
        """None: unknown, since the weight was never quantized on this rank."""
        self.is_full = False
        """Whether the hash is of the full weight, and not of this rank's shards."""

    def set_full(self, total: int) -> None:
        """Record the hash of the full weight."""
        self.total = total
        self.is_full = True

    def add(self, total: int) -> None:
        """Add the hash of shards on this rank."""
        self.total = total if self.total is None or self.is_full else self.total + total
        self.is_full = False


class StoredWeight(Tensor):
    """A frozen weight [..., out, in] in another form than values."""

    original: Original

    @abstractmethod
    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values as a plain tensor. ``dtype`` None: the weight's dtype."""

    @abstractmethod
    def stored(self, full: Tensor) -> Self:
        """Return a full weight with the values ``full``, in the form of this weight."""

    @abstractmethod
    def check_columns(self, first: int, size: int) -> None:
        """Check that a shard may hold ``size`` columns from ``first`` on.

        Raises:
            ShardingError: If values with a common scale would be on two ranks.
        """

    @abstractmethod
    def common_amax(self, values: Tensor) -> Tensor | None:
        """Return the amax of each matrix [..., 1, 1] if all shards of a matrix need a common amax,
        else None.
        """

    @abstractmethod
    def write(self, values: Tensor, amax: Tensor | None = None) -> None:
        """Quantize ``values`` of the weight's shape into the weight.

        Args:
            values: The values.
            amax: The result of :meth:`common_amax` over all shards of a matrix.
        """


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that hold the memory of ``tensor``."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names: Any = tensor.__tensor_flatten__()[0]
    for name in names:
        yield from plain_tensors(getattr(tensor, name))


def stored_part(tensor: Tensor) -> StoredWeight | None:
    """Return a tensor, or with FSDP2 this rank's shard of a tensor, if in another form than values,
    else None.
    """
    local = getattr(tensor, "_local_tensor", tensor)
    return local if isinstance(local, StoredWeight) else None


def stored_weights(module: nn.Module) -> dict[str, StoredWeight]:
    """Return the weights of a module in another form than values, by name. With FSDP2 the weights
    are this rank's shards.
    """
    parts = ((name, stored_part(parameter)) for name, parameter in module.named_parameters())
    return {name: weight for name, weight in parts if weight is not None}
