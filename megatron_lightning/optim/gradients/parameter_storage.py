"""Storage of parameters between steps: what ranks gather, and what the optimizer steps.

A :class:`ParameterStorage` makes the storage of every sharded bucket and of FSDP2's units. Storages
differ in the memory of the parameters and in writes from outside of a step:

    storage    ranks gather                parameters           written weights
    plain      values                      views of values      are taken over
    quantized  quantized data, 1 byte      views of the data    main params are, data are refused

The plain storage is here. ``precision.quantized_storage`` has the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_lightning.optim.gradients.data_groups import DataGroups
from megatron_lightning.optim.stepping.reassigned_data import check_rebound
from megatron_lightning.parallel.grid.context import AxisGroup

AllReduce = Callable[[Tensor, AxisGroup, dist.ReduceOp.RedOpType], None]


def all_reduce(tensor: Tensor, group: AxisGroup, op: dist.ReduceOp.RedOpType) -> None:
    """Reduce in place over the ranks of a group."""
    dist.all_reduce(tensor, op, group=group.process_group)


@dataclass(frozen=True, eq=False)
class BucketLayout:
    """Places of parameters in the 1-D buffers of a sharded bucket."""

    names: Sequence[str]
    parameters: Sequence[nn.Parameter]
    offsets: Sequence[int]
    """First element of each parameter."""
    size: int
    """Elements of a buffer."""
    shard: slice
    """Elements of this rank."""
    group: AxisGroup
    """Ranks of the shards."""

    def view(self, buffer: Tensor, index: int) -> Tensor:
        """Return a parameter's elements of a buffer, in the parameter's shape."""
        parameter, offset = self.parameters[index], self.offsets[index]
        return buffer[offset : offset + parameter.numel()].view(parameter.shape)

    def own_range(self, index: int) -> tuple[slice, int]:
        """Return a parameter's elements of this rank's shard, possibly none, and the index in the
        parameter of the first element.
        """
        offset = self.offsets[index]
        low = max(offset, self.shard.start)
        high = max(low, min(offset + self.parameters[index].numel(), self.shard.stop))
        return slice(low - self.shard.start, high - self.shard.start), low - offset

    def rebound(self, buffer: Tensor) -> list[int]:
        """Return the parameters with other memory than ``buffer``, by index."""
        first, size = buffer.data_ptr(), buffer.element_size()
        return [
            index
            for index, parameter in enumerate(self.parameters)
            if parameter.numel() and parameter.data_ptr() != first + self.offsets[index] * size
        ]


class StoredParameters(Protocol):
    """Parameters of a bucket, or of all FSDP2 units of a rank."""

    def store(self) -> None:
        """Store the parameters this way from now on."""
        ...

    def encode(self, reduce: AllReduce = all_reduce) -> None:
        """Renew this rank's shard of the gathered memory from the main params, before a gather. A
        collective.

        Args:
            reduce: Function to reduce in place.
        """
        ...

    def look_for_writes(self) -> None:
        """Look before a step for writes that the step would overwrite.

        Raises:
            ConfigError: If parameters were written. On GPUs a step later.
        """
        ...

    def were_written(self) -> bool:
        """Return whether main params were written since :meth:`encode`, so that ranks have to
        gather. Waits for the device.

        Raises:
            ConfigError: If memory without room for writes was written.
        """
        ...


class StoredBucket(StoredParameters, Protocol):
    """Parameters of a sharded bucket."""

    @property
    def value(self) -> Tensor:
        """1-D buffer gathered by the ranks, and viewed by the parameters."""
        ...

    @property
    def main(self) -> Tensor:
        """1-D buffer of this rank's shard, stepped by the optimizer."""
        ...

    @property
    def is_quantized(self) -> bool:
        """Whether the parameters are quantized data now, with main params in other memory."""
        ...

    def record(self) -> None:
        """Record the gathered parameters, for :meth:`were_written`."""
        ...

    def take_over(self) -> None:
        """Take over parameters with replaced memory (``p.data = ...``).

        Raises:
            ConfigError: If a parameter cannot be taken over.
        """
        ...

    def restore_values(self) -> None:
        """Gather the main params, and store values until the next :meth:`store`. A collective."""
        ...


class StoredUnits(StoredParameters, Protocol):
    """Parameters of a rank's FSDP2 units."""

    @property
    def names(self) -> Set[str]:
        """Parameters not gathered as values."""
        ...


class UnitShard(NamedTuple):
    """A parameter sharded by FSDP2."""

    name: str
    tensor: DTensor
    groups: DataGroups
    """The sharding ranks."""


class ParameterStorage(Protocol):
    """A way to store the parameters of a module."""

    @property
    def names(self) -> Set[str]:
        """Parameters stored this way. Other parameters are stored as values."""
        ...

    @property
    def opaque_layers(self) -> Mapping[str, nn.Module]:
        """Name of a parameter -> a layer that hides the parameter from compiled graphs."""
        ...

    def of_bucket(self, layout: BucketLayout) -> StoredBucket:
        """Move the parameters of a bucket, all in ``names``, into a common buffer."""
        ...

    def of_units(self, shards: Iterable[UnitShard]) -> StoredUnits:
        """Return the storage of all FSDP2 units of this rank. Effective from
        :meth:`StoredParameters.store` on.
        """
        ...


class PlainBucket:
    """A bucket's parameters as values. The optimizer steps this rank's range of the buffer."""

    is_quantized = False

    def __init__(self, layout: BucketLayout) -> None:
        self.layout = layout
        like = layout.parameters[0]
        self.value = torch.zeros(layout.size, dtype=like.dtype, device=like.device)
        for index, parameter in enumerate(layout.parameters):
            parameter.data = layout.view(self.value, index).copy_(parameter.data)

    @property
    def main(self) -> Tensor:
        """See :class:`StoredBucket`, as for all methods."""
        return self.value[self.layout.shard]

    def store(self) -> None:
        """Nothing to do."""

    def encode(self, reduce: AllReduce = all_reduce) -> None:
        """Nothing to do: the optimizer has stepped the gathered memory."""

    def record(self) -> None:
        """Nothing to do: parameters of all ranks are compared."""

    def look_for_writes(self) -> None:
        """Nothing to do: the optimizer reads written values."""

    def were_written(self) -> bool:
        """Return False: main params and parameters share memory."""
        return False

    def take_over(self) -> None:
        """Copy the new values into the buffer."""
        for index in self.layout.rebound(self.value):
            name, parameter = self.layout.names[index], self.layout.parameters[index]
            like = self.layout.view(self.value, index)
            check_rebound(name, parameter.data, like)
            parameter.data = like.copy_(parameter.data)

    def restore_values(self) -> None:
        """Nothing to do."""


class PlainUnits:
    """Parameters that FSDP2 gathers as values, with writes into shards gathered as well."""

    names: Set[str] = frozenset()

    def store(self) -> None:
        """Nothing to do."""

    def encode(self, reduce: AllReduce = all_reduce) -> None:
        """Nothing to do."""

    def look_for_writes(self) -> None:
        """Nothing to do."""

    def were_written(self) -> bool:
        """Return False: forwards read what was written."""
        return False


class PlainStorage:
    """The storage of parameters as values."""

    names: Set[str] = frozenset()

    @property
    def opaque_layers(self) -> Mapping[str, nn.Module]:
        """No layer."""
        return {}

    def of_bucket(self, layout: BucketLayout) -> StoredBucket:
        """Return the storage of a bucket."""
        return PlainBucket(layout)

    def of_units(self, shards: Iterable[UnitShard]) -> StoredUnits:
        """Return the storage of FSDP2's units."""
        return PlainUnits()
