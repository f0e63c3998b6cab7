"""Parallel linear layers y = x W + b with a weight [in, out], as GPT-2 stores weights.

The layers equal the layers of :mod:`megatron_lightning.layers.linear.parallel_linear` with the
weight's dims exchanged, so that checkpoints keep GPT-2's names and shapes.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

from megatron_lightning.layers.change_class import change_class
from megatron_lightning.layers.linear.gemm import Gemm, matmul
from megatron_lightning.parallel.collectives import copy_to_axis, reduce_from_axis
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.shards.sharding import take_shards
from megatron_lightning.parallel.shards.spec import ShardSpec

Self = TypeVar("Self", bound="_TransposedLinear")


class _TransposedLinear(nn.Module):
    """Base: this rank's shards of a layer's weight [in, out] and bias [out], or None."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    gemm: Gemm = Gemm()
    """GEMMs of the layer. Their weight is the transposed parameter."""
    group: AxisGroup
    shard_specs: dict[str, ShardSpec]

    @classmethod
    def _change(
        cls: type[Self], source: nn.Module, weight: ShardSpec, bias: ShardSpec, group: AxisGroup
    ) -> Self:
        """Reduce ``source`` to this rank's shard, in place, and return the layer."""
        layer = change_class(source, cls, group=group)
        specs = {"weight": weight, "bias": bias}
        if "bias" not in layer._parameters:
            layer.register_parameter("bias", None)
        own_specs = {
            name: spec for name, spec in specs.items() if layer._parameters[name] is not None
        }
        take_shards(layer, layer, own_specs)
        return layer

    def _matmul(self, x: Tensor) -> Tensor:
        """Map [..., in] to x W [..., out]."""
        return matmul(x, self.weight.t(), None, self.gemm)

    def extra_repr(self) -> str:
        """Return the global sizes."""
        rows, columns = self.shard_specs["weight"].global_shape
        return (
            f"{rows}, {columns}, bias={self.bias is not None}, {self.group.name}={self.group.size}"
        )


class TransposedColumnParallelLinear(_TransposedLinear):
    """Layer with output features split over the ranks: x [..., in] -> this rank's shard of [...,
    out].
    """

    @classmethod
    def from_layer(
        cls, source: nn.Module, *, group: AxisGroup, num_blocks: int = 1
    ) -> TransposedColumnParallelLinear:
        """Change the full layer ``source`` in place, and return the layer.

        Args:
            source: The full layer.
            group: The tensor-parallel ranks.
            num_blocks: Equal stacked blocks in the output, each split.

        Raises:
            ShardingError: If the output cannot be split evenly.
        """
        shape = tuple(source.weight.shape)  # type: ignore[arg-type]
        weight, bias = (
            ShardSpec.split(
                of, dim=dim, size=group.size, rank=group.rank, axis=group.name, blocks=num_blocks
            )
            for of, dim in ((shape, 1), (shape[1:], 0))
        )
        return cls._change(source, weight, bias, group)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out / ranks]."""
        y = self._matmul(copy_to_axis(x, self.group))
        return y if self.bias is None else y + self.bias.to(y.dtype)


class TransposedRowParallelLinear(_TransposedLinear):
    """Layer with input features split over the ranks: this rank's shard of x [..., in] -> [...,
    out].
    """

    @classmethod
    def from_layer(cls, source: nn.Module, *, group: AxisGroup) -> TransposedRowParallelLinear:
        """Change the full layer ``source`` in place, and return the layer.

        Raises:
            ShardingError: If the input cannot be split evenly.
        """
        shape = tuple(source.weight.shape)  # type: ignore[arg-type]
        weight = ShardSpec.split(shape, dim=0, size=group.size, rank=group.rank, axis=group.name)
        return cls._change(source, weight, ShardSpec.replicated(shape[1:]), group)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in / ranks] to [..., out]."""
        y = reduce_from_axis(self._matmul(x), self.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)
