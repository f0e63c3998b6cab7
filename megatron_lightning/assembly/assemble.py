"""Reduce a full module to this rank's part: equalize, partition into stages, parallelize,
materialize.

:func:`assemble` runs once for a module and stores a record on the module. :func:`reattach`
describes the part from the record, for a later run on the same layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from megatron_lightning.assembly.checks.layout_checks import check_experts, check_shared
from megatron_lightning.assembly.checks.replicas import equalize
from megatron_lightning.assembly.part import Part, describe_part
from megatron_lightning.assembly.partition import find_stages
from megatron_lightning.assembly.plans import (
    PlanChoice,
    Plans,
    declared_plans,
    resolve_plans,
)
from megatron_lightning.config import ContextOptions, PipelineOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.parallel.shards.materialize import materialize
from megatron_lightning.parallel.shards.sharding import ShardingPlan, parallelize
from megatron_lightning.parallel.shards.ties import record_ties, untied
from megatron_lightning.pipeline.schedules.actions import Placement
from megatron_lightning.pipeline.stages.stage import StagePartition, has_unit

_RECORD = "_megatron_record"


class _Record(NamedTuple):
    """Description of an assembled module, stored on the module. Plain values keep the module
    copyable.
    """

    layout: ParallelLayout
    placement: Placement
    options: PipelineOptions
    sequence: ContextOptions
    path: str | None
    """As in :class:`Part`, like the fields below."""
    stages: tuple[tuple[str, ...], ...]
    """Unit paths of every stage. Empty with one stage."""
    preludes: tuple[str, ...]
    """Paths of modules outside of the units on the first stage."""
    replicated_over_pp: frozenset[str]
    names: tuple[str, ...]
    num_parameters: int
    shards_sequence: bool
    plans: Plans


def assemble(
    module: nn.Module,
    context: ParallelContext,
    plan: PlanChoice,
    placement: Placement,
    options: PipelineOptions,
    *,
    allocates: bool = True,
) -> Part:
    """Reduce a full module to this rank's part, in place. All ranks call this.

    Args:
        module: The full module, on a real device or ``meta``.
        context: Groups of this rank.
        plan: Tensor-parallel plan by module path. None: the plans of modules with a
            ``sharding_plan()``.
        placement: Pipeline ranks of the stages.
        options: How the model is partitioned into stages.
        allocates: Whether to allocate and fill ``meta`` tensors. False: FSDP2 shards the module
            first.

    Raises:
        ConfigError: If the layout needs pipeline units or a plan and the module has none, or if
            patterns of a plan match nothing.
    """
    record_ties(module)
    names = tuple(module.state_dict())
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    equalize(module, context.axis("world"))
    # Before the partition: plans of ``transformers`` are translated from all layers.
    plans = resolve_plans(module, context.layout, plan, context.context_options.cp_comm_type)
    path, partition = _partition(module, context, placement, options)
    if partition is not None:
        check_shared(partition, path or "", plans.applied, context.tp.size)
    # After the partition: layers of other ranks need no parallel counterparts.
    parallelize_models(module, context, plans.applied)
    if allocates:
        # Last, so that a rank never holds more than the rank's shards and one full parameter.
        materialize(module, context.device)
    stages = () if partition is None else partition.stages
    preludes = () if partition is None else partition.preludes
    replicated_over_pp = frozenset[str]() if partition is None else partition.replicated_over_pp
    shards_sequence = context.sp and plans.shards_sequence
    module.__dict__[_RECORD] = _Record(
        context.layout,
        placement,
        options,
        context.context_options,
        path,
        stages,
        preludes,
        replicated_over_pp,
        names,
        num_parameters,
        shards_sequence,
        plans,
    )
    part = describe_part(module, names, num_parameters, path, partition)
    check_experts(part.specs, context)
    return replace(part, shards_sequence=shards_sequence, plans=plans)


def reattach(
    module: nn.Module, context: ParallelContext, placement: Placement, options: PipelineOptions
) -> Part:
    """Describe the part of ``module`` from an earlier run, for a run on the same layout.

    Raises:
        ConfigError: If the module was assembled for another layout, or the module's layers hold
            broken connections.
    """
    record: _Record = module.__dict__[_RECORD]
    assembled = record[:4]
    requested = (context.layout, placement, options, context.context_options)
    if assembled != requested:
        raise ConfigError(
            f"{type(module).__name__} was sharded for {_describe(*assembled)} by an earlier "
            f"Trainer and cannot be used with {_describe(*requested)}. Create a new module, and "
            "load a checkpoint into it."
        )
    # Layers hold groups of the earlier run, and an exception may have broken the communicators.
    if any(
        isinstance(value, AxisGroup) and value.is_broken
        for layer in module.modules()
        for holder in (layer, getattr(layer, "cp_comm", None))
        if holder is not None
        for value in vars(holder).values()
    ):
        raise ConfigError(
            f"the layers of {type(module).__name__} use connections that the exception in an "
            "earlier run has broken. Create a new module, and load a checkpoint into it."
        )
    partition = None
    if record.path is not None:
        stage_numbers = placement.stages_of(context.pp.rank)
        partition = StagePartition(
            module.get_submodule(record.path),
            record.stages,
            stage_numbers,
            record.replicated_over_pp,
            record.preludes,
            has_all_units=False,
        )
    part = describe_part(module, record.names, record.num_parameters, record.path, partition)
    # A pickled module has lost the plans, and the module's own plans are all that can be known.
    declared = declared_plans(module, None)
    plans = record.plans if record.plans.applied else Plans(declared=declared, applied=declared)
    return replace(part, shards_sequence=record.shards_sequence, plans=plans)


def is_assembled(module: nn.Module) -> bool:
    """Return whether the module has been reduced to a rank's part before."""
    return _RECORD in module.__dict__


def is_full(module: nn.Module, context: ParallelContext) -> bool:
    """Return whether the module has the layers of all ranks.

    An assembled module may have all layers, too: weight averaging calls ``configure_model``, which
    builds the layers again.
    """
    record: _Record | None = module.__dict__.get(_RECORD)
    if record is None:
        return True
    if record.layout != context.layout:
        return False
    # Without a pipeline every layer is there, and only sizes tell shards from full layers.
    if record.path is None:
        return (
            context.layout.model_parallel_size > 1
            and sum(parameter.numel() for parameter in module.parameters()) == record.num_parameters
        )
    pipelined, stage_numbers = (
        module.get_submodule(record.path),
        record.placement.stages_of(context.pp.rank),
    )
    # With a pipeline it is enough to look for one unit of another rank's stage.
    return any(
        has_unit(pipelined, unit)
        for stage, units in enumerate(record.stages)
        if stage not in stage_numbers
        for unit in units
    )


def can_be_partitioned(module: nn.Module) -> bool:
    """Return whether the model exists."""
    return any(True for _ in module.parameters())


def _partition(
    module: nn.Module, context: ParallelContext, placement: Placement, options: PipelineOptions
) -> tuple[str | None, StagePartition | None]:
    """Drop the units of other pipeline ranks. Return the path of the pipelined module, and the
    stages.
    """
    if context.layout.num_stages == 1:
        return None, None
    stages = find_stages(module, placement, options)
    stage_numbers = placement.stages_of(context.pp.rank)
    partition = StagePartition(
        stages.module,
        stages.units,
        stage_numbers,
        stages.replicated_over_pp,
        stages.outside.preludes,
    )
    return stages.path, partition


def parallelize_models(
    module: nn.Module, context: ParallelContext, plans: Mapping[str, ShardingPlan]
) -> None:
    """Parallelize the layers named by the plans. Over an axis of size 1 layers stay as before.

    Args:
        module: The module. Models in the module may share parameters.
        context: Groups of this rank.
        plans: Path of a model -> the model's plan.
    """
    with untied(module):
        for path, plan in plans.items():
            parallelize(module.get_submodule(path), context, plan, is_full=False)


def _describe(
    layout: ParallelLayout, placement: Placement, options: PipelineOptions, sequence: ContextOptions
) -> str:
    text = (
        f"tensor {layout.tp} x pipeline {layout.pp} x {layout.vpp} (sequence parallel {layout.sp}"
    )
    if layout.cp > 1:
        text += f", context {layout.cp} by {sequence.cp_comm_type}"
    if layout.num_stages > 1:
        text += f", stages on pipeline ranks {', '.join(map(str, placement.pp_ranks))}"
    changed = [
        f"{name}={value!r}"
        for name, value in vars(options).items()
        if value != getattr(PipelineOptions(), name)
    ]
    return ", ".join([text, *changed]) + ")"
