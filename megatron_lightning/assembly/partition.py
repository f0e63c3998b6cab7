"""Partition a full module into pipeline stages: units by cost, modules outside of the units, and
parameters replicated over pp. All ranks compute the same partition before assembly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from torch import nn

from megatron_lightning.assembly.preludes import Outside, find_outside
from megatron_lightning.config import (
    PipelineOptions,
    TransformerConfig,
)
from megatron_lightning.errors import ConfigError
from megatron_lightning.models.costs import pipeline_units
from megatron_lightning.pipeline.schedules.actions import Placement
from megatron_lightning.pipeline.schedules.partition import Unit, unit_names, unit_weights
from megatron_lightning.pipeline.schedules.stage_layouts import is_predicting, split_units
from megatron_lightning.pipeline.stages.dependencies import Uses
from megatron_lightning.pipeline.stages.dependency_run import ExampleRun, check_boundaries
from megatron_lightning.pipeline.stages.preludes import position_of
from megatron_lightning.pipeline.stages.stage import check_units
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
