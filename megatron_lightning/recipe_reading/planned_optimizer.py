"""The optimizer of a recipe, made for a model without values and tried as a fit does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from megatron_lightning.models.blueprint import Weight, unit_weights
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.optim import NO_DECAY, MaximalUpdate, ParamGroup
from megatron_lightning.optim.maximal_update import Scaling
from megatron_lightning.optim.named_optimizer import NamedOptimizer
from megatron_lightning.optim.owners.assignment import assign_owners
from megatron_lightning.optim.owners.readers import steps_matrices
from megatron_lightning.optim.owners.traffic import Traffic, describe_owners, describe_stack
from megatron_lightning.optim.owners.units import Units
from megatron_lightning.optim.stepping.chained import members
from megatron_lightning.optim.stepping.elementwise import reads_tensors, units_of
from megatron_lightning.parallel.grid.grid import RankGrid
from megatron_lightning.pipeline.schedules import resolve
from megatron_lightning.planning.ledger.optimizer_memory import shards_of
from megatron_lightning.planning.ledger.precision_bytes import precision_of
from megatron_lightning.planning.ledger.rank_parameters import split_stages
from megatron_lightning.planning.planned_run import Recipe

_MAIN = 4  # bytes of a gradient
_RATE = 1e-3
"""Learning rate. Nothing in a plan depends on it."""


class PlannedOptimizer:
    """The optimizer of a recipe.

    Args:
        recipe: The recipe.

    Raises:
        ConfigError: If the optimizer, its groups or maximal updates cannot be made.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        with torch.device("meta"):
            self._module = nn.ModuleDict({"model": GPTModel(recipe.model)})
        rule, scaling = recipe.maximal_update, None
        if rule is not None:
            scaling = Scaling.of_config(recipe.model, MaximalUpdate(**rule))
        rows = recipe.param_groups
        table = [NO_DECAY] if rows is None else [ParamGroup(**row) for row in rows]
        named = NamedOptimizer.of(recipe.optimizer or "AdamW")
        named.import_classes()
        named.check_patterns(self._module)
        self._optimizer = named.make(self._module, table, _RATE, scaling)
        self._names = {id(p): name for name, p in self._module.named_parameters()}

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups of maximal updates that have parameters. []: none are scaled."""
        if self._recipe.maximal_update is None:
            return []
        return [
            {
                "optimizer": type(member).__name__,
                "name": group["name"],
                "parameters": sum(parameter.numel() for parameter in group["params"]),
            }
            for member in members(self._optimizer)
            for group in member.param_groups
            if group["params"]
        ]

    def owners(self) -> dict[str, Any] | None:
        """Return what owners of full tensors send and keep in a step, of the pipeline rank with the
        highest peak. None: ranks step what they hold.

        Raises:
            ConfigError: If the optimizer reads more than full tensors.
        """
        owned = {
            member: units for member in members(self._optimizer) if (units := self._units(member))
        }
        traffic = max(
            (self._traffic(units, owned) for units in self._stages),
            key=lambda each: each.peak_bytes,
        )
        if not traffic.num_sent:
            return None
        classes = [type(member).__name__ for member in owned]
        lines = [describe_owners(classes, traffic, at_most=True)]
        if traffic.stack and self._grid.layout.ep > 1:
            lines.append(describe_stack(classes, traffic))
        return {
            "classes": classes,
            "ranks": len(traffic.owned),
            "sent": traffic.num_sent,
            "peak": traffic.peak_bytes,
            "fullest": max(traffic.owned),
            "largest": traffic.largest,
            "text": lines,
        }

    @cached_property
    def _grid(self) -> RankGrid:
        return RankGrid(self._recipe.layout, self._recipe.world_size)

    @cached_property
    def _shards(self) -> tuple[int, int]:
        """Ranks that share dense parameters, and experts."""
        return shards_of(self._grid, self._recipe.data_parallel, self._recipe.data)

    @cached_property
    def _stages(self) -> list[dict[str, Weight]]:
        """Name -> weight of each pipeline rank."""
        recipe = self._recipe
        placement = resolve(
            recipe.schedule,
            num_ranks=recipe.layout.pp,
            num_chunks=recipe.layout.vpp,
            microbatch_group_size=recipe.pipeline.microbatch_group_size_per_vp_stage,
        ).placement
        stages = split_stages(recipe.model, placement, recipe.pipeline)
        return [
            {
                f"model.{unit}.{weight.path}": weight
                for stage in placement.stages_of(pp_rank)
                for unit in stages[stage]
                for weight in unit_weights(recipe.model, unit)
            }
            for pp_rank in range(recipe.layout.pp)
        ]

    def _is_divided(self, weight: Weight) -> bool:
        layout, is_expert = self._recipe.layout, weight.experts is not None
        if self._shards[is_expert] > 1:
            return True
        num_ranks = layout.ep * layout.etp if is_expert else layout.tp
        return num_ranks > 1 and (is_expert or weight.split is not None)

    def _units(self, member: Optimizer) -> Units | None:
        """Return the full tensors that owners step. None: ranks step what they hold."""
        layout, weights = self._recipe.layout, self._weights(member)
        divided = [
            weight for some in weights.values() for weight in some if self._is_divided(weight)
        ]
        if not divided:
            return None
        if steps_matrices(member):
            return Units.MATRICES
        holds = {
            "flat": max(self._shards) > 1,
            "rows": layout.tp > 1 or layout.ep > 1,
            "columns": layout.tp > 1 or layout.etp > 1,
            "tensors": layout.pp > 1,
        }
        divisions = [name for name, is_so in holds.items() if is_so]
        shapes = {group: [weight.shape for weight in some] for group, some in weights.items()}
        said = self._recipe.data.whole_tensors
        if not reads_tensors(member, divisions, shapes, whole_tensors=said):
            return None
        stacks = {
            group: [w.shape for w in some if w.experts is not None and len(w.shape) > 2]
            for group, some in weights.items()
        }
        return units_of(member, stacks, whole_tensors=said)

    def _weights(self, member: Optimizer) -> dict[int, list[Weight]]:
        """Return the weights of each parameter group, by the group's id."""
        every = {name: weight for stage in self._stages for name, weight in stage.items()}
        return {
            id(group): [
                every[name] for p in group["params"] if (name := self._names[id(p)]) in every
            ]
            for group in member.param_groups
        }

    def _traffic(self, stage: Mapping[str, Weight], owned: Mapping[Optimizer, Units]) -> Traffic:
        """Return what owners of a pipeline rank's weights send and keep."""
        sizes: list[int] = []
        stacks, sent = [0], 0.0
        weight_bytes = precision_of(self._recipe.precision).weight_bytes
        for member, units in owned.items():
            for weight in self._stepped(member, stage):
                is_expert = weight.experts is not None and len(weight.shape) > 2
                count = weight.shape[0] if is_expert and units is not Units.WHOLE else 1
                holders = self._num_ranks // (self._recipe.layout.ep if count > 1 else 1)
                sizes += [weight.size // count] * count
                sent += weight.size * (1 - 1 / holders) * (_MAIN + weight_bytes)
                stacks.append(weight.size if is_expert and units is Units.WHOLE else 0)
        ranks = list(range(self._num_ranks))
        load = [0] * self._num_ranks
        owner = assign_owners(sizes, [ranks] * len(sizes), [[0] * self._num_ranks] * len(sizes))
        for size, rank in zip(sizes, owner, strict=True):
            load[rank] += size
        return Traffic(round(sent), max(sizes, default=0), tuple(load), max(stacks))

    @property
    def _num_ranks(self) -> int:
        """Ranks that own parameters together."""
        layout = self._recipe.layout
        return max(layout.tp, layout.ep * layout.etp, layout.tp * self._shards[0])

    def _stepped(self, member: Optimizer, stage: Mapping[str, Weight]) -> Iterator[Weight]:
        for group in member.param_groups:
            for parameter in group["params"]:
                weight = stage.get(self._names[id(parameter)])
                if weight is not None and self._is_divided(weight):
                    yield weight
