"""Shard of a parameter for reduction and optimizer step on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_lightning.optim.gradients.data_groups import DataGroups
from megatron_lightning.parallel.shards.spec import Box, Shard, ShardSpec


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the summed gradients and main params of ``dtype`` parameters."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


@dataclass(eq=False)
class ParameterShard:
    """A range of a local parameter, with the gradient reduced and the values stepped on this
    rank.
    """

    start: int
    """Index of the first element in the flattened local parameter."""
    is_full: bool
    """Whether the shard is the full local parameter."""
    value: Tensor
    """View of the parameter: in the parameter's shape for a full shard, else 1-D."""
    gradient: Tensor
    """View of the gradient buffer in the shape of ``value``. Without a buffer any tensor like the
    gradients."""
    target: nn.Parameter
    """Carrier of the gradient for the optimizer: the parameter itself, a view of the parameter, or
    an fp32 main param."""
    is_main: bool = False
    """Whether ``value`` itself is the fp32 main param of a parameter used in lower precision."""
    box: Box | None = None
    """Range of the local parameter. None: the elements from ``start`` on."""

    def shards(self, spec: ShardSpec, tensor: Tensor) -> list[Shard]:
        """Return the shards of the global parameter in a tensor like ``value``."""
        if self.is_full:
            return spec.shards(tensor)
        if self.box is None:
            return spec.flat_shards(tensor, self.start)
        part = spec.part(self.box)
        return part.shards(tensor.view(part.local_shape))

    @classmethod
    def full(cls, parameter: nn.Parameter, gradient: Tensor | None = None) -> ParameterShard:
        """Return the shard of an undivided parameter."""
        value = parameter.detach()
        return cls(0, True, value, value if gradient is None else gradient, parameter)


class MainShard(NamedTuple):
    """Main params of a parameter stored as quantized data."""

    shard: ParameterShard | None
    """Shard of this rank. None: this rank has no shard."""
    dtype: torch.dtype
    groups: DataGroups
    """The ranks with the other shards, and the ranks with the same shard."""

    def shards(self, spec: ShardSpec) -> list[Shard]:
        """Return this rank's shards of the global parameter."""
        return [] if self.shard is None else self.shard.shards(spec, self.shard.value)
