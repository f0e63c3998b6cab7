"""Ranks, groups, collectives and the sharding of parameters."""

from typing import TYPE_CHECKING

from megatron_lightning._lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lightning.parallel.context import AxisGroup, ParallelContext
    from megatron_lightning.parallel.grid import RankGrid
    from megatron_lightning.parallel.layout import ParallelLayout
    from megatron_lightning.parallel.sharding import ShardingPlan, parallelize
    from megatron_lightning.parallel.spec import ShardSpec

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
        "AxisGroup": "megatron_lightning.parallel.context",
        "ParallelContext": "megatron_lightning.parallel.context",
        "ParallelLayout": "megatron_lightning.parallel.layout",
        "RankGrid": "megatron_lightning.parallel.grid",
        "ShardSpec": "megatron_lightning.parallel.spec",
        "ShardingPlan": "megatron_lightning.parallel.sharding",
        "parallelize": "megatron_lightning.parallel.sharding",
    },
)
