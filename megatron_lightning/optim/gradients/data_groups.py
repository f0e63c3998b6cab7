"""The ranks of equal parameters and different data."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext


def has_replicas(context: ParallelContext) -> bool:
    """Return whether several ranks hold the same dense or expert parameters."""
    return max(context.dp_cp.size, context.edp.size) > 1


@dataclass(frozen=True, eq=False)
class DataGroups:
    """The ranks of equal parameters and different data, and the sharding of gradients over the
    ranks.
    """

    all: AxisGroup
    """All ranks of equal parameters."""
    shard: AxisGroup
    """The ranks of different shards of gradients and optimizer state."""
    replicas: AxisGroup
    """The ranks with the same shards as this rank."""
    sharded: bool
    """Whether a rank keeps only a shard of the reduced gradients."""

    def shard_of(self, numel: int) -> slice:
        """Return this rank's elements of a gradient buffer."""
        size = numel // self.shard.size
        start = self.shard.rank * size
        return slice(start, start + size) if self.sharded else slice(0, numel)

    @classmethod
    def of(
        cls, group: AxisGroup, context: ParallelContext, *, sharded: bool, num_instances: int
    ) -> DataGroups:
        """Return the groups of parameters replicated over ``group``. All ranks make the same
        calls.
        """
        shard, replicas = context.divide(group, num_instances if sharded else 1)
        return cls(group, shard, replicas, sharded and shard.size > 1)

    @classmethod
    def by_axes(
        cls, context: ParallelContext, *, sharded: bool, num_instances: int
    ) -> dict[str, DataGroups]:
        """Return ``ShardSpec.data_axes`` -> the groups of such parameters. All ranks call this."""
        return {
            group.name: cls.of(group, context, sharded=sharded, num_instances=num_instances)
            for group in (context.dp_cp, context.edp)
        }
