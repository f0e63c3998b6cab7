"""Sections of a plan for a measured module. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_lightning.mistakes import Errors
from megatron_lightning.pipeline.schedules import ScheduleChoice, resolve
from megatron_lightning.pipeline.schedules.actions import Schedule
from megatron_lightning.planning.bubble import describe_bubble
from megatron_lightning.planning.measured.measured_layout import (
    MeasuredLayout,
    Stages,
    check_measured,
    operations,
)
from megatron_lightning.planning.memory import Memory
from megatron_lightning.planning.planned_run import MeasuredRecipe


def describe_measured(
    recipe: MeasuredRecipe, errors: Errors
) -> tuple[dict[str, Any], Memory, Any] | None:
    """Return stages, operations and bubble, the memory, and the grid. None after recording the
    reasons in ``errors``.
    """
    layout = recipe.layout
    grid = errors.attempt(check_measured, recipe)
    choice = errors.attempt(
        resolve, recipe.schedule, num_ranks=layout.pp, num_chunks=layout.vpp,
        microbatch_group_size=recipe.pipeline.microbatch_group_size_per_vp_stage,
    )  # fmt: skip
    table = None if choice is None else errors.attempt(choice.table, recipe.num_microbatches)
    stages = recipe.model.stages(layout.pp, layout.vpp, recipe.pipeline)
    if stages is None:
        errors.add(
            f"{recipe.model.name} cannot be divided into {layout.pp * layout.vpp} stages "
            f"({len(recipe.model.units)} units). Set pipeline_model_parallel_size lower."
        )
    if errors.found or grid is None or choice is None or table is None or stages is None:
        return None
    measured = MeasuredLayout(recipe, grid, stages, table)
    total, samples = operations(recipe), recipe.global_batch_size
    sections = {
        "stages": _stages(measured, choice, stages),
        "flops": {
            "step": total,
            "step_and_rank": total / grid.world_size,
            "sample": total / samples,
            "global_batch_size": samples,
        },
        "bubble": _bubble(recipe, choice, table, stages),
    }
    return sections, measured.memory(), grid


def _stages(
    measured: MeasuredLayout, choice: ScheduleChoice, stages: Stages
) -> list[dict[str, Any]]:
    return [
        {
            "stage": stage,
            "pp_rank": choice.placement.pp_ranks[stage],
            "layers": [number for unit in units if (number := _number(unit)) is not None],
            "other_units": [unit for unit in units if _number(unit) is None],
            "parameters": measured.parameters(stage),
        }
        for stage, units in enumerate(stages)
    ]


def _number(unit: str) -> int | None:
    last = unit.rpartition(".")[2]
    return int(last) if last.isdigit() else None


def _bubble(
    recipe: MeasuredRecipe, choice: ScheduleChoice, table: Schedule, stages: Sequence[Sequence[str]]
) -> dict[str, Any]:
    works = [sum(recipe.model.units[unit].forward_flops for unit in units) for units in stages]
    works[-1] += recipe.model.outside.forward_flops
    return describe_bubble(choice, table, works)
