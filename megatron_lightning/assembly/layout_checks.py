"""Checks of a full module and the module's layers against the layout. All ranks run the checks on
the same module before assembly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from torch import nn

from megatron_lightning.assembly.plans import PlanChoice, resolve_plans
from megatron_lightning.assembly.preludes import Outside, find_outside
from megatron_lightning.assembly.sharded_modules import find_sharded
from megatron_lightning.config import (
    CPCommType,
    PipelineOptions,
    RecomputeOptions,
    TransformerConfig,
)
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.recompute import check_patterns
from megatron_lightning.models.costs import pipeline_units
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.parallel.layout import ParallelLayout
from megatron_lightning.parallel.sharding import ShardingPlan
from megatron_lightning.parallel.spec import ShardSpec
from megatron_lightning.pipeline.schedules import ScheduleChoice
from megatron_lightning.pipeline.schedules.actions import Placement
from megatron_lightning.pipeline.schedules.partition import Unit, unit_names, unit_weights
from megatron_lightning.pipeline.schedules.stage_layouts import is_predicting, split_units
from megatron_lightning.pipeline.stages.dependencies import Uses
from megatron_lightning.pipeline.stages.dependency_run import ExampleRun, check_boundaries
from megatron_lightning.pipeline.stages.preludes import position_of
from megatron_lightning.pipeline.stages.stage import StagePartition, check_units
from megatron_lightning.pipeline.stages.units import find_pipelined


def check_partition(
    module: nn.Module, placement: Placement, options: PipelineOptions, *, is_built: bool
) -> Stages | None:
    """Check that the model can be partitioned into stages, as far as the layers are known before
    the model is built. Return the stages, or None if they are not known yet.

    Raises:
        ConfigError: If no units are found, or the units do not fit the model or the stages.
    """
    if placement.num_stages == 1 and options == PipelineOptions():
        return None
    config = getattr(module, "config", None)
    if is_built:
        return find_stages(module, placement, options)
    if isinstance(config, TransformerConfig):
        split_units(pipeline_units(config), placement, options)
    return None


_UNEVEN = 1.5  # share of the fullest pipeline rank, in units of the mean


class Stages(NamedTuple):
    """How a full module is partitioned into stages."""

    path: str
    """Path of the pipelined module."""
    module: nn.Module
    """The pipelined module."""
    units: tuple[tuple[str, ...], ...]
    """Unit paths of every stage."""
    replicated_over_pp: frozenset[str]
    """Unit parameters replicated over pp, since several stages use the parameters."""
    costs: tuple[float, ...]
    """Share of every pipeline rank in the weights of the units, preludes included."""
    outside: Outside
    """Modules outside of the units: on the first stage or on every stage."""

    def describe_imbalance(self) -> str | None:
        """Return a sentence if the fullest pipeline rank has more than 1.5 times the mean."""
        fullest = max(self.costs)
        if fullest * len(self.costs) <= _UNEVEN:
            return None
        return (
            f"pipeline rank {self.costs.index(fullest)} of {len(self.costs)} has {fullest:.0%} of "
            "the layers' cost, and the others wait for it in every step. Set "
            "pipeline_model_parallel_size lower, or name smaller modules in "
            "PipelineOptions(units=[...])."
        )


def find_stages(module: nn.Module, placement: Placement, options: PipelineOptions) -> Stages:
    """Return how a full module is partitioned.

    Raises:
        ConfigError: If no units are found, or the units do not fit the model or the stages.
    """
    example = ExampleRun(module)
    path, pipelined, units = find_pipelined(
        module, options.units or (), example.calls, example.operations
    )
    names = unit_names(units)
    check_units(pipelined, names)
    outside = Outside(pipelined)
    if placement.num_stages > 1:
        kept_patterns = options.replicated_modules or ()
        outside = find_outside(pipelined, names, example.calls(path), kept_patterns)
    # A prelude runs on the first stage alone. A prelude called later, or with state that reaches
    # other stages, is replicated instead. Uses, weights and stages then change, and are computed
    # again.
    while True:  # fewer preludes in every turn
        uses = None
        if placement.num_stages > 1:
            uses = example.uses(path, names, outside.preludes)
        if uses is not None and (obstacles := outside.handing_on(uses)):
            outside = outside.without(obstacles)
            continue
        weighed = outside.weighted(units, partial(example.operations, path))
        stages = _split(weighed, placement, options, uses, outside.preludes)
        obstacles = {} if uses is None else outside.late(uses, len(stages[0]))
        if not obstacles:
            break
        outside = outside.without(obstacles)
    replicated = _replicated_over_pp(pipelined, stages, placement, uses, outside.preludes)
    costs = _costs(weighed, stages, placement)
    return Stages(path, pipelined, stages, replicated, costs, outside)


def _split(
    units: Sequence[Unit],
    placement: Placement,
    options: PipelineOptions,
    uses: Uses | None,
    preludes: Sequence[str],
) -> tuple[tuple[str, ...], ...]:
    """Return the unit paths of every stage. See :func:`find_stages`."""
    names = unit_names(units)
    if uses is None:
        return split_units(units, placement, options)
    try:
        stages = split_units(units, placement, options, uses.allows)
    except ConfigError:  # a side channel may be why too few stages are left
        anywhere = split_units(units, placement, options)
        check_boundaries(uses, names, _starts(anywhere), preludes)
        raise
    check_boundaries(uses, names, _starts(stages), preludes)
    return stages


def _costs(
    units: Sequence[Unit], stages: Sequence[Sequence[str]], placement: Placement
) -> tuple[float, ...]:
    """Return the share of every pipeline rank in the weights of the units."""
    weights = dict(zip(unit_names(units), unit_weights(units), strict=True))
    ranks = [0.0] * placement.num_ranks
    for pp_rank, stage in zip(placement.pp_ranks, stages, strict=True):
        ranks[pp_rank] += sum(weights[name] for name in stage)
    return tuple(cost / sum(ranks) for cost in ranks)


def _starts(stages: Sequence[Sequence[str]]) -> list[int]:
    """Return the index of the first unit of every stage."""
    return [0, *accumulate(map(len, stages[:-1]))]


def _replicated_over_pp(
    module: nn.Module,
    stages: Sequence[Sequence[str]],
    placement: Placement,
    uses: Uses | None,
    preludes: Sequence[str] = (),
) -> frozenset[str]:
    """Return the unit parameters replicated over pp, by all of their names.

    A parameter read by units on several ranks is replicated over pp, unless the parameter is tied.
    A tied parameter has a name in each of the units, and the units are on the first rank, on the
    last rank, or on the rank of multi-token prediction: these ranks add up the gradients of their
    copies. A parameter with a name outside of the units is replicated over pp if the name is read,
    or if a rank has no other name. Preludes count as units of the first stage.
    """
    units = [unit for stage in stages for unit in stage]
    rank_of = [rank for stage, rank in zip(stages, placement.pp_ranks, strict=True) for _ in stage]
    num_units = len(units)
    units += preludes
    rank_of += [placement.pp_ranks[0]] * len(preludes)

    def place(reader: int) -> int:
        return reader if reader >= 0 else num_units + position_of(reader, len(preludes))

    # Ranks that add up the gradients of tied copies.
    ends, replicated = {0, placement.num_ranks - 1}, set[str]()
    ends |= {rank for unit, rank in zip(units, rank_of, strict=True) if is_predicting(unit)}
    # Names of a tied parameter. The dependency run knows a parameter by the first name only.
    first_name: dict[int, str] = {id(p): name for name, p in reversed([*module.named_parameters()])}
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    parameter_reads = uses.parameters if uses else frozenset[tuple[str, int]]()
    names_between = uses.read_between if uses else frozenset[str]()
    for identity, own_names in names.items():
        homes = {
            index for index, unit in enumerate(units) for n in own_names if n.startswith(f"{unit}.")
        }
        if not homes:
            continue
        # Units that read the parameter without having a name for it.
        readers = {place(i) for name, i in parameter_reads if name == first_name[identity]} - homes
        ranks = {rank_of[index] for index in homes}
        # If all ranks have the parameter in a unit, a name outside is an alias, and counts only
        # when read.
        outside_counts = uses is None or ranks != set(range(placement.num_ranks))
        is_outside = first_name[identity] in names_between or (
            outside_counts
            and any(not n.startswith(tuple(f"{unit}." for unit in units)) for n in own_names)
        )
        reached = ranks | {rank_of[index] for index in readers if index < len(units)}
        if is_outside or reached != ranks or (len(ranks) > 1 and not ends.issuperset(ranks)):
            replicated.update(own_names)
    return frozenset(replicated) if placement.num_ranks > 1 else frozenset()


def check_shared(
    partition: StagePartition, path: str, plans: Mapping[str, ShardingPlan], tensor_size: int
) -> None:
    """Check that no parameter replicated over pp is sharded over tensor-parallel ranks.

    Args:
        partition: The pipelined module and the module's stages.
        path: Path of the pipelined module.
        plans: Sharding plans by the path of their module.
        tensor_size: Tensor-parallel ranks.

    Raises:
        ConfigError: Naming the parameter.
    """
    for name in sorted(partition.replicated_over_pp) if tensor_size > 1 else ():
        owner = ".".join(filter(None, [path, name.rpartition(".")[0]]))
        for root, plan in plans.items():
            prefix = f"{root}." if root else ""
            if owner.startswith(prefix) and plan.style_of(owner.removeprefix(prefix)) is not None:
                raise ConfigError(
                    f"{name} is used on several pipeline stages, and its sharding plan divides it "
                    f"over {tensor_size} tensor-parallel ranks, which cannot be combined. If the "
                    "forward reads it on the first and the last stage only, an example_input_array "
                    "of the LightningModule shows it; else set tensor_model_parallel_size or "
                    "pipeline_model_parallel_size to 1."
                )


def check_experts(specs: Mapping[str, ShardSpec], context: ParallelContext) -> None:
    """Check that the module has experts if the layout divides experts. A collective of the pipeline
    ranks.

    Args:
        specs: Specs of this rank's parameters.
        context: Groups of this rank.

    Raises:
        ConfigError: On all ranks, if no parameter of the model is an expert's.
    """
    layout = context.layout
    if not layout.divides_experts:
        return
    mine = any(spec.is_expert for spec in specs.values())
    if not any(context.pp.all_gather_object(mine)):
        raise ConfigError(
            f"expert_model_parallel_size={layout.ep} and expert_tensor_parallel_size={layout.etp} "
            "divide experts, and no parameter of the model is split over ep or etp by its sharding "
            "plan. Add rows for the experts to the plan, or leave both sizes unset."
        )


def check_sharded_units(module: nn.Module, options: PipelineOptions, num_stages: int) -> None:
    """Check that FSDP2 has modules to shard.

    Raises:
        ConfigError: If a pipeline finds no units, or if nothing can be sharded without a pipeline.
    """
    if num_stages > 1:
        find_pipelined(module, options.units or ())
    else:
        find_sharded(module, options)


def check_layers(
    module: nn.Module,
    recompute: RecomputeOptions,
    layout: ParallelLayout,
    plan: PlanChoice,
    cp_comm_type: CPCommType | Sequence[CPCommType] = "p2p",
) -> None:
    """Check the recomputed layers and the sharding plan of a full module.

    Raises:
        ConfigError: For names without a match, layers that cannot be recomputed together, a module
            without a plan, and a plan contradicting the layout.
    """
    check_patterns(module, recompute)
    resolve_plans(module, layout, plan, cp_comm_type)


def check_trained_layers(
    module: nn.Module, schedule: ScheduleChoice, num_replicas: int, *, sharded: bool = False
) -> None:
    """Check all layers of a full module for training in ``schedule`` with ``num_replicas``
    data-parallel ranks.

    Raises:
        ConfigError: For sparse gradients over several replicas, and for FSDP2-sharded, compiled
            layers with deferred weight gradients.
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
        # A compiled layer defers with a view of the layer's parameter, and FSDP2 replaces the
        # parameter.
        if sharded and schedule.splits_backward and child._compiled_call_impl is not None:
            raise ConfigError(
                f"{name or type(module).__name__} is compiled, schedule {schedule} defers weight "
                "gradients, and "
                'data_parallel="fsdp" replaces the weights that a compiled layer needs for them. '
                'Set data_parallel to "zero1", or pipeline_schedule to "1f1b" or "interleaved", or '
                "do not compile."
            )
