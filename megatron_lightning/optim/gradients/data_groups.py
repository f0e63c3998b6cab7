"""The ranks that hold the same parameters and see different data."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lightning.parallel.context import AxisGroup, ParallelContext


def has_replicas(context: ParallelContext) -> bool:
    """Return whether several ranks hold the same parameters: dense ones, or experts'."""
    return max(context.dp_cp.size, context.edp.size) > 1


@dataclass(frozen=True, eq=False)
class DataGroups:
    """The ranks that hold the same parameters and see different data, and how they shard
    gradients.
    """

    all: AxisGroup
    """All of them."""
    shard: AxisGroup
    """Those among which gradients and optimizer state are sharded."""
    replicas: AxisGroup
    """Those that keep the same shards as this rank."""
    sharded: bool
    """Whether a rank keeps only its shard of the reduced gradients."""

    def shard_of(self, numel: int) -> slice:
        """Return the elements of a gradient buffer that this rank keeps."""
        size = numel // self.shard.size
        start = self.shard.rank * size
        return slice(start, start + size) if self.sharded else slice(0, numel)

    @classmethod
    def of(
        cls, group: AxisGroup, context: ParallelContext, *, sharded: bool, num_instances: int
    ) -> DataGroups:
        """Return the groups of one kind of parameters, which are replicated over ``group``; all
        ranks call this alike.
        """
        shard, replicas = context.divide(group, num_instances if sharded else 1)
        return cls(group, shard, replicas, sharded and shard.size > 1)

    @classmethod
    def by_axes(
        cls, context: ParallelContext, *, sharded: bool, num_instances: int
    ) -> dict[str, DataGroups]:
        """Return ``ShardSpec.data_axes`` -> the groups of such parameters; all ranks call this."""
        return {
            group.name: cls.of(group, context, sharded=sharded, num_instances=num_instances)
            for group in (context.dp_cp, context.edp)
        }
