"""Styles of linear layers with a weight stored as [in, out] (``Conv1D`` of GPT-2)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.linear.replaceable import (
    check_forward,
    check_hooks,
    check_parameter_hooks,
)
from megatron_lightning.layers.linear.transposed import (
    TransposedColumnParallelLinear,
    TransposedRowParallelLinear,
)
from megatron_lightning.layers.styles.adapters import divide_column, divide_row
from megatron_lightning.layers.styles.parameters import Split, shard_parameters
from megatron_lightning.layers.styles.tensor import ColumnParallel, RowParallel
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.parallel.shards.sharding import ShardingPlan


@dataclass(frozen=True)
class TransposedColumnParallel:
    """y = x W + b, W [in, out] -> :class:`TransposedColumnParallelLinear`.

    Weight: columns (dim 1) split. Input: replicated, with all-reduced gradient. Output: this rank's
        features. Bias: split.
    """

    num_blocks: int = 1
    """Equal stacked blocks in the output, each split (3 for a fused query, key and value)."""

    def check(self, module: nn.Module, layout: ParallelLayout, plan: ShardingPlan) -> None:
        """Check that the layer can be sharded.

        Raises:
            ShardingError: If the layer cannot be sharded.
        """
        _check(module, "TransposedColumnParallel")
        check_hooks(module, "TransposedColumnParallel", ("output",))
        check_parameter_hooks(module, "weight", "bias")

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Return the column-parallel layer."""
        if context.tp.size == 1:
            return _keep(module, context.tp, weight=1, bias=0)
        self.check(module, context.layout, plan)
        return TransposedColumnParallelLinear.from_layer(
            module, group=context.tp, num_blocks=self.num_blocks
        )

    def divide_adapters(
        self, module: nn.Module, context: ParallelContext, plan: ShardingPlan
    ) -> None:
        """Divide the adapters of the layer. The factors are plain linear layers."""
        column = ColumnParallel(num_blocks=self.num_blocks)
        divide_column(module, lambda _: column, context, plan, copies_input=True)


@dataclass(frozen=True)
class TransposedRowParallel:
    """y = x W + b, W [in, out] -> :class:`TransposedRowParallelLinear`.

    Weight: rows (dim 0) split. Input: this rank's features. Output: all-reduced. The gradient
    passes unchanged. Bias: full, added after the reduction.
    """

    def check(self, module: nn.Module, layout: ParallelLayout, plan: ShardingPlan) -> None:
        """Check that the layer can be sharded.

        Raises:
            ShardingError: If the layer cannot be sharded.
        """
        _check(module, "TransposedRowParallel")
        check_hooks(module, "TransposedRowParallel", ("input",))
        check_parameter_hooks(module, "weight")

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Return the row-parallel layer."""
        if context.tp.size == 1:
            return _keep(module, context.tp, weight=0)
        self.check(module, context.layout, plan)
        return TransposedRowParallelLinear.from_layer(module, group=context.tp)

    def divide_adapters(
        self, module: nn.Module, context: ParallelContext, plan: ShardingPlan
    ) -> None:
        """Divide the adapters of the layer. The factors are plain linear layers."""
        divide_row(module, RowParallel(), context, plan)


def _keep(module: nn.Module, group: AxisGroup, **dims: int) -> nn.Module:
    """Return ``module`` for a group of one rank, with parameters recorded as sharded."""
    specs = {
        name: Split(dim) for name, dim in dims.items() if module._parameters.get(name) is not None
    }
    shard_parameters(module, specs, group)
    return module


def _check(module: nn.Module, style: str) -> None:
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 2 or isinstance(module, nn.Linear | nn.Embedding):
        raise ShardingError(
            f"style {style} takes a layer with a weight of shape [in, out], such as GPT-2's "
            f"Conv1D, and the plan points it at a {type(module).__name__}. Correct the pattern, or "
            "give this module another style."
        )
    # The class that defines the forward must be a direct nn.Module, not derived from another layer.
    owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    if owner.__bases__ != (nn.Module,):
        check_forward(module, (owner.__bases__[0],), style)
    check_forward(module, (type(module),), style)
