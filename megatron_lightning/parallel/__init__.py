"""Ranks, groups, collectives and the sharding of parameters."""

from typing import TYPE_CHECKING

from megatron_lightning._lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
    from megatron_lightning.parallel.grid.grid import RankGrid
    from megatron_lightning.parallel.grid.layout import ParallelLayout
    from megatron_lightning.parallel.shards.sharding import ShardingPlan, parallelize
    from megatron_lightning.parallel.shards.spec import ShardSpec

__all__ = [
    "AxisGroup",
    "ParallelContext",
    "ParallelLayout",
    "RankGrid",
    "ShardSpec",
    "ShardingPlan",
    "parallelize",
]

lazy_attributes(
    __name__,
    {
        "AxisGroup": "megatron_lightning.parallel.grid.context",
        "ParallelContext": "megatron_lightning.parallel.grid.context",
        "ParallelLayout": "megatron_lightning.parallel.grid.layout",
        "RankGrid": "megatron_lightning.parallel.grid.grid",
        "ShardSpec": "megatron_lightning.parallel.shards.spec",
        "ShardingPlan": "megatron_lightning.parallel.shards.sharding",
        "parallelize": "megatron_lightning.parallel.shards.sharding",
    },
)
