"""Pipeline parallelism: schedules as data, a proof on paper, and one executor that runs them."""

from typing import TYPE_CHECKING

from megatron_lightning._lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lightning.pipeline.actions import Action, Kind, Placement, Schedule
    from megatron_lightning.pipeline.executor import PipelineExecutor, StageProgram
    from megatron_lightning.pipeline.partition import partition_units
    from megatron_lightning.pipeline.stage import StagePartition, find_pipelined_module

__all__ = [
    "Action",
    "Kind",
    "PipelineExecutor",
    "Placement",
    "Schedule",
    "StagePartition",
    "StageProgram",
    "find_pipelined_module",
    "partition_units",
]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "Action": "megatron_lightning.pipeline.actions",
        "Kind": "megatron_lightning.pipeline.actions",
        "PipelineExecutor": "megatron_lightning.pipeline.executor",
        "Placement": "megatron_lightning.pipeline.actions",
        "Schedule": "megatron_lightning.pipeline.actions",
        "StagePartition": "megatron_lightning.pipeline.stage",
        "StageProgram": "megatron_lightning.pipeline.executor",
        "find_pipelined_module": "megatron_lightning.pipeline.stage",
        "partition_units": "megatron_lightning.pipeline.partition",
    },
)
