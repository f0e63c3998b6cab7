"""Styles of state-space layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.state_space.shared_groups import SharedGroups
from megatron_lightning.layers.styles.parameters import Split, shard_parameters
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.parallel.shards.sharding import ShardingPlan


@dataclass(frozen=True)
class GroupedHeads:
    """A module with a value, or channels, for each head, and heads in groups: the mixer of Mamba-2,
    and the mixer's gated norm.

    Weights: split by heads. If ranks outnumber the groups, neighbors share a group
    (:class:`SharedGroups`). The mixer also gets the context-parallel ranks.
    """

    params: tuple[str, ...]
    """Names of the direct parameters, each split in dim 0."""
    num_heads: int
    """Heads of the model."""
    num_groups: int
    """Groups of the model."""
    shares_sequences = True
    """Whether a module of this style mixes tokens of sequences shared with other ranks."""

    def check(self, module: nn.Module, layout: ParallelLayout, plan: ShardingPlan) -> None:
        """Check that the heads and groups can be sharded.

        Raises:
            ShardingError: If the ranks divide neither.
        """
        heads, groups, size = self.num_heads, self.num_groups, layout.tp
        if heads % size or (groups % size and size % groups):
            raise ShardingError(
                f"{heads} heads in {groups} groups cannot be split over {size} tensor-parallel "
                "ranks: a rank has equally many heads, and full groups or part of one group. Set "
                f"tensor_model_parallel_size to a divisor of {heads} that divides {groups} or is a "
                f"multiple of {groups}."
            )

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Split the parameters in place, and bind the module to the ranks."""
        self.check(module, context.layout, plan)
        shard_parameters(module, dict.fromkeys(self.params, Split()), context.tp)
        if context.tp.size > self.num_groups:
            module.shared_groups = SharedGroups(context.tp, self.num_groups)  # type: ignore[assignment]
        if context.cp.size > 1 and hasattr(module, "context_group"):
            module.context_group = context.cp  # type: ignore[assignment]
        return module
