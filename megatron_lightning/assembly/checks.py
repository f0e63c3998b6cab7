"""Checks of a full module and its layers against the layout; all ranks run them on the same module
before assembly.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from megatron_lightning.assembly.plans import check_plans
from megatron_lightning.config import PipelineOptions, RecomputeOptions, TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.recompute import check_patterns
from megatron_lightning.parallel.layout import ParallelLayout
from megatron_lightning.parallel.sharding import ShardingPlan, shared_names
from megatron_lightning.pipeline.actions import Placement
from megatron_lightning.pipeline.layouts import split_units
from megatron_lightning.pipeline.partition import unit_names
from megatron_lightning.pipeline.schedules import ScheduleChoice
from megatron_lightning.pipeline.stage import check_units, find_pipelined_module, pipeline_units


def check_partition(
    module: nn.Module, placement: Placement, options: PipelineOptions, *, is_built: bool
) -> None:
    """Check that the model can be partitioned into stages, as far as its layers are known before it
    is built.

    Raises:
        ConfigError: If no submodule, or more than one, has ``pipeline_units()``, or these do not
            fit the model or the stages.
    """
    if placement.num_stages == 1 and options == PipelineOptions():
        return
    config = getattr(module, "config", None)
    if any(hasattr(child, "pipeline_units") for child in module.modules()):
        find_stages(module, placement, options)
    elif placement.num_stages > 1 and is_built:
        find_pipelined_module(module)  # raises
    elif isinstance(config, TransformerConfig):
        layers = [f"layers.{index}" for index in range(config.num_layers)]
        split_units(["embedding", *layers, "output_layer"], placement, options)


def find_stages(
    module: nn.Module, placement: Placement, options: PipelineOptions
) -> tuple[str, nn.Module, tuple[tuple[str, ...], ...]]:
    """Return (path, module, unit paths of every stage) of the one submodule that has
    ``pipeline_units()``.

    Raises:
        ConfigError: If there is none, or more than one, or its units do not fit it or the stages.
    """
    path, pipelined = find_pipelined_module(module)
    units = pipeline_units(pipelined)
    stages = split_units(units, placement, options)
    if placement.num_stages > 1:
        check_units(pipelined, unit_names(units))
    _check_ties(module, path, stages, placement)
    return path, pipelined, stages


def _check_ties(
    module: nn.Module, path: str, stages: Sequence[Sequence[str]], placement: Placement
) -> None:
    """Check that parameters tied across stages lie on ranks that add up their gradients."""
    prefix, ends = f"{path}." if path else "", {0, placement.num_ranks - 1}
    where = {
        f"{prefix}{unit}": placement.pp_ranks[index]
        for index, units in enumerate(stages)
        for unit in units
    }
    for names in shared_names(module):
        ranks = {
            name: rank
            for name in names
            for unit, rank in where.items()
            if name == unit or name.startswith(f"{unit}.")
        }
        if len(set(ranks.values())) > 1 and not ends.issuperset(ranks.values()):
            raise ConfigError(
                f"{' and '.join(ranks)} are one parameter and would lie on the pipeline ranks "
                f"{list(ranks.values())}. Only the first and the last of the {placement.num_ranks} "
                "ranks add up the gradients of such parameters. Put the units that share it on "
                "one rank (pipeline_options), or give each a parameter of its own."
            )


def check_sharded_units(module: nn.Module) -> None:
    """Check that FSDP2 finds units to shard.

    Raises:
        ConfigError: For a model without ``pipeline_units()``.
    """
    try:
        find_pipelined_module(module)
    except ConfigError as error:
        raise ConfigError(
            'data_parallel="fsdp" shards the units that a model lists in pipeline_units(), and '
            f"{type(module).__name__} "
            "does not have exactly one submodule with that method. Give it to the model that the "
            "step calls, or set "
            'data_parallel="zero1".'
        ) from error


def check_layers(
    module: nn.Module,
    recompute: RecomputeOptions,
    layout: ParallelLayout,
    plan: ShardingPlan | None,
) -> None:
    """Check the recomputed layers and the sharding plan of a full module.

    Raises:
        ConfigError: For names that match nothing, layers that cannot be recomputed together, and a
            module without a plan, or with one that the layout contradicts.
    """
    check_patterns(module, recompute)
    check_plans(module, layout, plan)


def check_trained_layers(
    module: nn.Module, schedule: ScheduleChoice, num_replicas: int, *, sharded: bool = False
) -> None:
    """Check all layers of a full module for training in ``schedule`` with ``num_replicas``
    data-parallel ranks.

    Raises:
        ConfigError: For sparse gradients over several replicas, and FSDP2-sharded, compiled layers
            that defer gradients.
    """
    for name, child in module.named_modules() if num_replicas > 1 else ():
        if (
            isinstance(child, nn.Embedding | nn.EmbeddingBag)
            and child.sparse
            and child.weight.requires_grad
        ):
            raise ConfigError(
                f"{name} has sparse=True, and its gradients are reduced over {num_replicas} "
                "data-parallel ranks in buffers, which are dense. Set sparse=False, or use one "
                "data-parallel rank."
            )
        # A compiled layer defers with a view of its parameter, which FSDP2 replaces.
        if sharded and schedule.splits_backward and child._compiled_call_impl is not None:
            raise ConfigError(
                f"{name or type(module).__name__} is compiled, schedule {schedule} defers weight "
                "gradients, and "
                'data_parallel="fsdp" replaces the weights that a compiled layer needs for them. '
                'Set data_parallel to "zero1", or pipeline_schedule to "1f1b" or "interleaved", or '
                "do not compile."
            )
