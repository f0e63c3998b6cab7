"""Parallel linear layers y = x W + b whose weight is [in, out], as GPT-2 stores it.

They are those of :mod:`megatron_lightning.layers.linear` with the dims of the weight exchanged, so
that checkpoints keep its names and shapes.
"""

from __future__ import annotations

from torch import Tensor, nn

from megatron_lightning.layers.gemm import Gemm, product
from megatron_lightning.parallel.collectives import copy_to_axis, reduce_from_axis
from megatron_lightning.parallel.context import AxisGroup
from megatron_lightning.parallel.sharding import take_shards
from megatron_lightning.parallel.spec import ShardSpec


class _TransposedLinear(nn.Module):
    """Base: this rank's shards of a layer's weight [in, out] and bias [out], or None."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    gemm: Gemm = Gemm()
    """Products of the layer, whose weight is the transposed parameter."""
    shard_specs: dict[str, ShardSpec]

    def __init__(
        self, source: nn.Module, weight: ShardSpec, bias: ShardSpec, *, group: AxisGroup
    ) -> None:
        super().__init__()
        self.group = group
        specs = {"weight": weight, "bias": bias}
        own = [name for name in specs if source._parameters.get(name) is not None]
        self.register_parameter("bias", None)
        take_shards(self, source, {name: specs[name] for name in own})
        self.train(source.training)

    def _product(self, x: Tensor) -> Tensor:
        """Map [..., in] to x W [..., out]."""
        return product(x, self.weight.t(), None, self.gemm)

    def extra_repr(self) -> str:
        """Return the global sizes."""
        rows, columns = self.shard_specs["weight"].global_shape
        return (
            f"{rows}, {columns}, bias={self.bias is not None}, {self.group.name}={self.group.size}"
        )


class TransposedColumnParallelLinear(_TransposedLinear):
    """Layer whose output features are split over the ranks: x [..., in] -> this rank's shard of
    [..., out].

    Args:
        source: The full layer.
        group: The tensor-parallel ranks.
        num_blocks: Equal blocks stacked in the output that are each split.

    Raises:
        ShardingError: If the output cannot be split evenly.
    """

    def __init__(self, source: nn.Module, *, group: AxisGroup, num_blocks: int = 1) -> None:
        shape = tuple(source.weight.shape)  # type: ignore[arg-type]
        weight, bias = (
            ShardSpec.split(
                of, dim=dim, size=group.size, rank=group.rank, axis=group.name, blocks=num_blocks
            )
            for of, dim in ((shape, 1), (shape[1:], 0))
        )
        super().__init__(source, weight, bias, group=group)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out / ranks]."""
        y = self._product(copy_to_axis(x, self.group))
        return y if self.bias is None else y + self.bias.to(y.dtype)


class TransposedRowParallelLinear(_TransposedLinear):
    """Layer whose input features are split over the ranks: this rank's shard of x [..., in] ->
    [..., out].

    Args:
        source: The full layer.
        group: The tensor-parallel ranks.

    Raises:
        ShardingError: If the input cannot be split evenly.
    """

    def __init__(self, source: nn.Module, *, group: AxisGroup) -> None:
        shape = tuple(source.weight.shape)  # type: ignore[arg-type]
        weight = ShardSpec.split(shape, dim=0, size=group.size, rank=group.rank, axis=group.name)
        super().__init__(source, weight, ShardSpec.replicated(shape[1:]), group=group)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in / ranks] to [..., out]."""
        y = reduce_from_axis(self._product(x), self.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)
