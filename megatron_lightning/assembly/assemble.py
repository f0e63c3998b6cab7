"""Turn the whole LightningModule into this rank's part: cut into stages, shard over tensor ranks, fill the weights.

The steps, in this order: equal weights on all ranks (a module that was initialised at random), drop the pipeline units of other
ranks, replace layers by their parallel counterparts, allocate and initialise what is still on ``meta``, read the specs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.assembly.checks import check_ties, find_tables
from megatron_lightning.config import PipelineOptions
from megatron_lightning.errors import ConfigError, ShardingError
from megatron_lightning.parallel.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.layout import ParallelLayout
from megatron_lightning.parallel.materialize import materialize
from megatron_lightning.parallel.sharding import (
    ShardingPlan,
    ShardSpec,
    named_shard_specs,
    note_ties,
    parallelize,
    tied_names,
)
from megatron_lightning.pipeline.actions import Placement
from megatron_lightning.pipeline.layouts import cut_units
from megatron_lightning.pipeline.microbatches import tensors_of
from megatron_lightning.pipeline.stage import StagePartition, find_pipelined_module, has_unit, pipeline_units


class _Mark(NamedTuple):
    """Left on an assembled LightningModule; plain values, so that the module stays copyable."""

    layout: ParallelLayout
    placement: Placement
    options: PipelineOptions
    stages: tuple[tuple[str, ...], ...]
    """Unit paths of every stage; empty without a pipeline."""
    names: tuple[str, ...]
    """Keys of the whole module's state dict, in order."""
    num_parameters: int
    """Elements of the whole module's parameters."""


@dataclass
class Assembly:
    """What this rank holds of the module."""

    specs: dict[str, ShardSpec]
    """Spec of every parameter, by its name in the LightningModule."""
    tied: dict[str, str]
    """Name of a tied copy -> name of its owner."""
    names: tuple[str, ...]
    """Keys of the whole module's state dict, in order."""
    num_parameters: int
    """Elements of the whole module's parameters."""
    path: str | None = None
    """Path of the module that is cut into stages; None with one stage."""
    partition: StagePartition | None = None
    """The stages of that module which live on this rank."""
    stage_of_unit: dict[str, int] = field(default_factory=dict)
    """Prefix of the names in a pipeline unit of this rank -> its stage; other names are held by every pipeline rank."""
    stage_of: dict[str, int] = field(default_factory=dict)
    """Name of a parameter -> the one stage of this rank that uses it; parameters that several may use are absent."""

    @property
    def own_stages(self) -> list[list[str]]:
        """Prefixes of the units of each of this rank's stages; empty with one stage."""
        stages = sorted(set(self.stage_of_unit.values()))
        return [[unit for unit, stage in self.stage_of_unit.items() if stage == own] for own in stages]

    def in_unit(self, name: str) -> bool:
        """Return whether a parameter or buffer belongs to a pipeline unit, so that only this pipeline rank holds it."""
        return self.unit_stage(name) is not None

    def unit_stage(self, name: str) -> int | None:
        """Return the stage of the unit that a parameter or buffer belongs to; None: it is outside of the units."""
        stages = self.stage_of_unit.items()
        return next((stage for prefix, stage in stages if name == prefix or name.startswith(f"{prefix}.")), None)


def is_assembled(module: nn.Module) -> bool:
    """Return whether the module has been reduced to a rank's part already."""
    return "_megatron_mark" in module.__dict__


def can_be_cut(module: nn.Module) -> bool:
    """Return whether the model exists and says how it is cut."""
    return any(hasattr(child, "pipeline_units") or hasattr(child, "sharding_plan") for child in module.modules())


def assemble(
    module: nn.Module,
    context: ParallelContext,
    plan: ShardingPlan | None,
    placement: Placement,
    options: PipelineOptions,
    *,
    allocates: bool = True,
) -> Assembly:
    """Reduce ``module`` to this rank's part, in place; a module that already is, is only described.

    Args:
        module: The LightningModule, whole, on a real device or ``meta``.
        context: Groups of this rank.
        plan: Tensor-parallel table by module path; None: the ``sharding_plan()`` of the modules that have one.
        placement: Where the pipeline stages live.
        options: How the model is cut into stages.
        allocates: Whether what is on ``meta`` is given memory and values; else that is left for who divides it further.

    Raises:
        ConfigError: If the module has no pipeline units or no table though the layout needs them, was assembled for
            another layout, or talks over broken connections.
    """
    mark: _Mark | None = module.__dict__.get("_megatron_mark")
    wanted = (context.layout, placement, options)
    if mark is not None and mark[:3] != wanted:
        raise ConfigError(
            f"{type(module).__name__} was sharded for {_describe(*mark[:3])} by an earlier Trainer and cannot be used with "
            f"{_describe(*wanted)}. Create a new module, and load a checkpoint into it."
        )
    if any(isinstance(value, AxisGroup) and value.is_broken for layer in module.modules() for value in vars(layer).values()):
        raise ConfigError(
            f"the layers of {type(module).__name__} talk over connections that the exception in an earlier run has broken. "
            "Create a new module, and load a checkpoint into it."
        )
    if mark is not None and _is_built_again(module, mark, context):
        mark = None
    partition, names = None, mark.names if mark else tuple(module.state_dict())
    if mark is None:
        note_ties(module)
    num_parameters = mark.num_parameters if mark else sum(parameter.numel() for parameter in module.parameters())
    if mark is None and context.world_size > 1:
        _equalize(module, context.axis("world"))
    if context.layout.num_stages > 1:
        path, pipelined = find_pipelined_module(module)
        stages = mark.stages if mark else cut_units(pipeline_units(pipelined), placement, options)
        own = placement.stages_of(context.pp.rank)
        if mark is None:
            check_ties(module, path, stages, placement)
        partition = StagePartition(pipelined, stages, own, whole=mark is None)
    if mark is None:
        if context.layout.tp > 1:
            _parallelize(module, context, plan)
        if allocates:
            materialize(module, context.device)
        stages = partition.stages if partition else ()
        module.__dict__["_megatron_mark"] = _Mark(*wanted, stages, names, num_parameters)
    assembly = Assembly(named_shard_specs(module), tied_names(module), names, num_parameters)
    if partition is not None:
        assembly.path, assembly.partition = path, partition
        prefix = f"{path}." if path else ""
        assembly.stage_of_unit = {prefix + unit: stage for stage in partition.own for unit in partition.stages[stage]}
        assembly.specs = {name: _summed_over_stages(name, spec, assembly) for name, spec in assembly.specs.items()}
    assembly.stage_of = _stage_of(module, assembly)
    return assembly


def _is_built_again(module: nn.Module, mark: _Mark, context: ParallelContext) -> bool:
    """Return whether another ``configure_model``, such as weight averaging calls, has brought other ranks' parts back."""
    if not mark.stages:
        return context.layout.tp > 1 and sum(parameter.numel() for parameter in module.parameters()) == mark.num_parameters
    _, pipelined = find_pipelined_module(module)
    own = mark.placement.stages_of(context.pp.rank)
    return any(has_unit(pipelined, unit) for stage, units in enumerate(mark.stages) if stage not in own for unit in units)


def _stage_of(module: nn.Module, assembly: Assembly) -> dict[str, int]:
    if assembly.partition is None:
        return dict.fromkeys(assembly.specs, 0)
    users: dict[int, set[int | None]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):  # a tied one has a name on each of its stages
        users.setdefault(id(parameter), set()).add(assembly.unit_stage(name))
    only = {name: users[id(parameter)] for name, parameter in module.named_parameters()}
    return {name: stage for name, stages in only.items() if len(stages) == 1 for stage in stages if stage is not None}


def _describe(layout: ParallelLayout, placement: Placement, options: PipelineOptions) -> str:
    text = f"tensor {layout.tp} x pipeline {layout.pp} x {layout.vpp} (sequence parallel {layout.sp}"
    if layout.num_stages > 1:
        text += f", stages on pipeline ranks {', '.join(map(str, placement.coordinates))}"
    changed = [f"{name}={value!r}" for name, value in vars(options).items() if value != getattr(PipelineOptions(), name)]
    return ", ".join([text, *changed]) + ")"


def _summed_over_stages(name: str, spec: ShardSpec, assembly: Assembly) -> ShardSpec:
    """A parameter outside the units (used before or after the pipelined call) gets its gradient on one stage or on several."""
    return spec if assembly.in_unit(name) else replace(spec, partial_over=(*spec.partial_over, "pp"))


def _parallelize(module: nn.Module, context: ParallelContext, plan: ShardingPlan | None) -> None:
    plans = find_tables(module, context.layout.tp) if plan is None else {"": plan}
    for path, table in plans.items():
        parallelize(module.get_submodule(path), context, table)


def _equalize(module: nn.Module, world: AxisGroup) -> None:
    """Give all ranks rank 0's weights where they differ (unseeded initialisation), as DistributedDataParallel does."""
    tensors = [t for t in (*module.parameters(), *module.buffers()) if not t.is_meta]
    if not tensors or not disagreeing(torch.stack([fingerprint(t) for t in tensors]), world):
        return
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=world.ranks[0], group=world.process_group)


def fingerprint(tensor: Tensor) -> Tensor:
    """Return an int64 that depends on every bit of ``tensor`` and on their order."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    padded = torch.nn.functional.pad(raw, (0, -raw.numel() % 8)).view(torch.int64)
    return (padded * (2 * torch.arange(padded.numel(), device=padded.device) + 1)).sum()  # odd factors keep every bit


def disagreeing(fingerprints: Tensor, group: AxisGroup) -> list[int]:
    """Return the indices at which the ranks of ``group`` have different fingerprints; a collective."""
    if group.process_group is None:
        return []
    low, high = fingerprints.clone(), fingerprints.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group.process_group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group.process_group)
    return [int(index) for index in (low != high).nonzero()]


def check_replicas(parameters: Mapping[str, Tensor], specs: Mapping[str, ShardSpec], context: ParallelContext) -> None:
    """Check that parameters that are not sharded over an axis are bit-equal over it.

    Raises:
        ShardingError: Naming the parameters that differ and the axis.
    """
    names = list(parameters)
    if context.world_size == 1 or not names:
        return
    marks = torch.stack([fingerprint(parameters[name]) for name in names])
    groups = {"dp-cp": context.dp_cp, "tp": context.tp}
    for axis, group in groups.items():
        equal = [i for i, name in enumerate(names) if not set(axis.split("-")) & set(specs[name].sharded_over)]
        differing = [names[equal[i]] for i in disagreeing(marks[equal], group)]
        if differing:
            raise ShardingError(
                f"{len(differing)} parameter(s) differ between the {axis} ranks {list(group.ranks)}, and their spec says they "
                f"are replicated: {', '.join(differing[:5])}. Initialise them from one seed, or declare how they are sharded."
            )


def check_same_batch(batch: object, context: ParallelContext) -> None:
    """Check that the ranks of a model replica read the same batch; a collective of the replica.

    Raises:
        ShardingError: If they do not, so that stages and tensor ranks would work on different samples.
    """
    marks = [fingerprint(tensor).to(context.device) for tensor in tensors_of(batch)] or [torch.zeros((), dtype=torch.int64)]
    replica = context.axis("tp-pp")
    if disagreeing(torch.stack(marks).sum().view(1).to(context.device), replica):
        raise ShardingError(
            f"ranks {list(replica.ranks)} hold parts of one model replica and read different first batches. Draw random "
            "transforms from torch's generators (seed_everything(..., workers=True) seeds those of workers), and give these "
            "ranks one share of the data: a DistributedSampler or an iterable dataset of your own takes num_replicas and rank "
            "from trainer.distributed_sampler_kwargs."
        )
