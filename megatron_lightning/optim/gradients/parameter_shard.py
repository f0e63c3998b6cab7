"""Shard of a parameter that a rank reduces and steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_lightning.optim.gradients.data_groups import DataGroups
from megatron_lightning.parallel.spec import Box, Shard, ShardSpec


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the summed gradients and main params of ``dtype`` parameters."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


@dataclass(eq=False)
class ParameterShard:
    """The range of one local parameter whose reduced gradient this rank has, and which its
    optimizer steps.
    """

    start: int
    """Index of the first element in the flattened local parameter."""
    is_full: bool
    """Whether the shard is the full local parameter."""
    value: Tensor
    """View of the parameter: its own shape when the shard is full, else 1-D."""
    gradient: Tensor
    """View of the gradient buffer, same shape as ``value``; where there is no buffer, any tensor
    like its gradients."""
    target: nn.Parameter
    """Carries the gradient to the optimizer: the parameter itself, a view of it, or an fp32 main
    param."""
    is_main: bool = False
    """Whether ``value`` itself is the fp32 main param of a parameter that is used in lower
    precision."""
    box: Box | None = None
    """Range of the local parameter; None: the elements from ``start`` on."""

    def shards(self, spec: ShardSpec, tensor: Tensor) -> list[Shard]:
        """Return the shards of the global parameter of which a tensor like ``value`` consists."""
        if self.is_full:
            return spec.shards(tensor)
        if self.box is None:
            return spec.flat_shards(tensor, self.start)
        part = spec.part(self.box)
        return part.shards(tensor.view(part.local_shape))

    @classmethod
    def full(cls, parameter: nn.Parameter, gradient: Tensor | None = None) -> ParameterShard:
        """Return the shard of a parameter that is not divided."""
        value = parameter.detach()
        return cls(0, True, value, value if gradient is None else gradient, parameter)


class MainShard(NamedTuple):
    """Main params of a parameter that is kept as codes."""

    shard: ParameterShard | None
    """Shard of this rank; None: it has none."""
    dtype: torch.dtype
    groups: DataGroups
    """The ranks that have the rest, and the same."""

    def shards(self, spec: ShardSpec) -> list[Shard]:
        """Return what this rank has as shards of the global parameter."""
        return [] if self.shard is None else self.shard.shards(spec, self.shard.value)
