"""Grid, stages, memory, operations and bubble of a run to plan, and their text. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from megatron_lightning.mistakes import Errors
from megatron_lightning.models.costs import multiply_adds
from megatron_lightning.parallel.grid.grid import RankGrid
from megatron_lightning.pipeline.schedules import ScheduleChoice, resolve
from megatron_lightning.pipeline.schedules.actions import Schedule
from megatron_lightning.planning.bubble import describe_bubble
from megatron_lightning.planning.flops import (
    OPERATIONS_PER_WEIGHT,
    flops,
)
from megatron_lightning.planning.ledger.rank_parameters import (
    count_rank,
    layer_of,
    split_stages,
)
from megatron_lightning.planning.ledger.tower_memory import TOWER, TowerSizes
from megatron_lightning.planning.memory import Memory, RankMemory
from megatron_lightning.planning.planned_run import MeasuredRecipe, PlannedRun, Recipe
from megatron_lightning.planning.recipe_checks import check_sizes, recipe_memory
from megatron_lightning.planning.search.devices import GIB, PlannedDevice, advice

_DENSE, _EXPERT = ("tp", "cp", "dp", "pp"), ("etp", "ep", "edp")
_BYTES = ("weights", "gradients", "optimizer", "activations", "total")


def describe_fit(
    recipe: PlannedRun, device: PlannedDevice, ranks: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the ranks too large for a device, and the sufficient changes of the recipe."""

    def needed(changed: PlannedRun) -> float | None:
        described = describe(changed, Errors())
        return None if described is None else float(described["bytes"]["fullest_rank"]["total"])

    full_ranks = [rank["pp_rank"] for rank in ranks if rank["total"] > device.usable_bytes]
    return {
        "name": device.name,
        "memory": device.memory_bytes,
        "usable": device.usable_bytes,
        "fits": not full_ranks,
        "pp_ranks_too_full": full_ranks,
        "advice": advice(recipe, device, needed) if full_ranks else [],
    }


def describe(recipe: PlannedRun, errors: Errors) -> dict[str, Any] | None:
    """Return the sections, or None if the options do not fit together.

    ``errors`` holds the reasons.
    """
    if isinstance(recipe, MeasuredRecipe):
        from megatron_lightning.planning.measured.measured_report import describe_measured

        description = describe_measured(recipe, errors)
        if description is None:
            return None
        sections, needed, grid = description
        return {"grid": _grid(recipe, grid, has_experts=False), **sections, "bytes": _bytes(needed)}
    return _describe_recipe(cast("Recipe", recipe), errors)


def _describe_recipe(recipe: Recipe, errors: Errors) -> dict[str, Any] | None:
    grid = check_sizes(recipe, errors)
    choice = errors.attempt(
        resolve,
        recipe.schedule,
        num_ranks=recipe.layout.pp,
        num_chunks=recipe.layout.vpp,
        microbatch_group_size=recipe.pipeline.microbatch_group_size_per_vp_stage,
    )
    table = stages = None
    if choice is not None:
        table = errors.attempt(choice.table, recipe.num_microbatches)
        stages = errors.attempt(
            split_stages, recipe.model, choice.placement, recipe.pipeline, ahead=recipe.ahead
        )
    # All mistakes are collected, and the rest needs every part.
    if errors.found or grid is None or choice is None or table is None or stages is None:
        return None
    needed = errors.attempt(recipe_memory, recipe, grid, table, stages)
    if needed is None:
        return None
    return {
        "grid": _grid(recipe, grid, has_experts=recipe.model.moe is not None),
        "stages": _stages(recipe, choice, stages),
        "bytes": _bytes(needed),
        "flops": _flops(recipe, grid),
        "bubble": _bubble(recipe, choice, table, stages),
        **({} if recipe.model.hybrid is None else {"layer_pattern": recipe.model.layer_pattern}),
        **({} if recipe.tower is None else {"images": _images(recipe.tower)}),
    }


def _grid(recipe: PlannedRun, grid: RankGrid, *, has_experts: bool) -> dict[str, Any]:
    shown = (*_DENSE, *_EXPERT) if has_experts else _DENSE
    axes = {axis: grid.size(axis) for axis in (*_DENSE, *_EXPERT)}
    return {
        "world_size": grid.world_size,
        "num_nodes": recipe.num_nodes,
        "node_size": recipe.node_size,
        "order": grid.layout.order,
        "sequence_parallel": grid.layout.sp,
        **axes,
        # Groups of the other ranks lie alike.
        "ranks_of_rank_0": {axis: list(grid.group_of(0, axis)) for axis in shown if axes[axis] > 1},
    }


def _stages(
    recipe: Recipe, choice: ScheduleChoice, stages: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    costs, tower = [_work(recipe, stage, units) for stage, units in enumerate(stages)], recipe.tower
    return [
        {
            "stage": stage,
            "pp_rank": choice.placement.pp_ranks[stage],
            "layers": [number for unit in units if (number := layer_of(unit)) is not None],
            "other_units": [
                *([TOWER] if tower is not None and stage == 0 else []),
                *(unit for unit in units if layer_of(unit) is None),
            ],
            "parameters": count_rank(recipe.model, recipe.layout, [units]).total
            + (tower.parameters if tower is not None and stage == 0 else 0),
            "cost": costs[stage] * len(costs) / sum(costs),
        }
        for stage, units in enumerate(stages)
    ]


def _bytes(needed: Memory) -> dict[str, Any]:
    def row(rank: RankMemory) -> dict[str, int]:
        return {name: getattr(rank, f"{name}_bytes") for name in _BYTES}

    return {
        "fullest_rank": {"pp_rank": needed.fullest.pp_rank, **row(needed.fullest)},
        "pp_ranks": [
            {"pp_rank": rank.pp_rank, **row(rank), "in_flight": rank.in_flight}
            for rank in needed.ranks
        ],
    }


def _flops(recipe: Recipe, grid: RankGrid) -> dict[str, float]:
    samples = recipe.batch_size * recipe.accumulated * grid.size("dp")
    total = flops(recipe.model, batch_size=samples, sequence_length=recipe.sequence_length)
    if recipe.adapters is not None:
        total *= 2 / 3  # no gradients of frozen weights; adapters themselves are left out
    if recipe.tower is not None:
        total += samples * _tower_operations(recipe, recipe.tower)
    return {
        "step": total,
        "step_and_rank": total / grid.world_size,
        "token": total / (samples * recipe.sequence_length),
        "global_batch_size": samples,
    }


def _bubble(
    recipe: Recipe, choice: ScheduleChoice, table: Schedule, stages: Sequence[Sequence[str]]
) -> dict[str, Any]:
    works = [_work(recipe, stage, units) for stage, units in enumerate(stages)]
    return describe_bubble(choice, table, works)


def _images(tower: TowerSizes) -> dict[str, int]:
    return {"tokens": tower.image_tokens, "patches": tower.num_patches}


def _work(recipe: Recipe, stage: int, units: Sequence[str]) -> float:
    """Return the operations of a stage for one sample."""
    own = sum(_operations(recipe, unit) for unit in units)
    return own + (_tower_operations(recipe, recipe.tower) if recipe.tower and stage == 0 else 0.0)


def _tower_operations(recipe: Recipe, tower: TowerSizes) -> float:
    """Return the operations of the tower for one sample."""
    return OPERATIONS_PER_WEIGHT * tower.trained_work(recipe.adapters)


def _operations(recipe: Recipe, unit: str) -> float:
    """Return the operations of a unit for one sample."""
    return OPERATIONS_PER_WEIGHT * multiply_adds(recipe.model, unit, [recipe.sequence_length])


# ------------------------------------------------------------------------------------------- text


def report_text(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a description."""
    grid, bubble, operations = found["grid"], found["bubble"], found["flops"]
    axes = [f"{axis} {grid[axis]}" for axis in _DENSE]
    if grid["ep"] > 1 or grid["etp"] != grid["tp"]:
        axes += [f"({', '.join(f'{axis} {grid[axis]}' for axis in _EXPERT)})"]
    yield (
        f"{grid['world_size']:,} ranks: {' x '.join(axes[:4])}{' '.join(['', *axes[4:]])}, "
        f"sequence parallel {'on' if grid['sequence_parallel'] else 'off'}"
    )
    for axis, ranks in grid["ranks_of_rank_0"].items():
        yield f"  {axis:<3} group of rank 0: {_shortened(ranks)}"
    yield ""
    rows = [["stage", "pp rank", "layers", "parameters"]]
    for stage in found["stages"]:
        layers = stage["layers"]
        text = "-".join(map(str, dict.fromkeys((layers[0], layers[-1])))) if layers else "none"
        rows.append(
            [
                str(stage["stage"]),
                str(stage["pp_rank"]),
                ", ".join([text, *map(_short, stage["other_units"])]),
                f"{stage['parameters']:,}",
            ]
        )
    yield from _aligned(rows)
    if "layer_pattern" in found and len(found["stages"]) > 1:
        yield _balance_text(found["stages"])
    yield ""
    rows = [["GiB a rank", *_BYTES, "in flight"]]
    for rank in found["bytes"]["pp_ranks"]:
        numbers = [f"{rank[name] / 2**30:.2f}" for name in _BYTES]
        rows.append([f"pp rank {rank['pp_rank']}", *numbers, str(rank["in_flight"])])
    yield from _aligned(rows)
    yield ""
    kind = "token" if "token" in operations else "sample"
    per_item = f"{operations[kind]:.4g} a {kind}"
    yield (
        f"{operations['step']:.4g} FLOPs a step of {operations['global_batch_size']:,} samples, "
        f"{operations['step_and_rank'] / 1e12:.4g} TFLOPs a rank, {per_item}"
    )
    if "images" in found:
        images = found["images"]
        yield (
            f"images of {images['tokens']:,} tokens a sample pass the tower as "
            f"{images['patches']:,} patches; set --image-tokens to those of your samples"
        )
    count = f"{bubble['num_microbatches']} micro-batch{'es' * (bubble['num_microbatches'] > 1)}"
    if len(found["bytes"]["pp_ranks"]) == 1:
        yield f"no pipeline, {count}"
    else:
        yield (
            f"schedule {bubble['schedule']} ({bubble['reason']}), {count}: bubble "
            f"{bubble['share']:.1%}"
        )
    if "device" in found:
        yield from _fit_text(found["device"], found["bytes"]["fullest_rank"]["total"])


def _balance_text(stages: Sequence[Mapping[str, Any]]) -> str:
    """Describe the imbalance of stages of unlike layers: highest cost, and most parameters."""
    counts = [stage["parameters"] for stage in stages]
    dearest = max(stages, key=lambda stage: float(stage["cost"]))
    fullest = max(stages, key=lambda stage: int(stage["parameters"]))
    return (
        f"stage {dearest['stage']} costs {dearest['cost']:.2f} x the mean (FLOPs); stage "
        f"{fullest['stage']} has {max(counts) * len(counts) / sum(counts):.2f} x the mean's "
        "parameters"
    )


def _fit_text(device: Mapping[str, Any], needed: float) -> Iterator[str]:
    usable = f"{device['usable'] / GIB:.0f} of {device['memory'] / GIB:.0f} GiB are for tensors"
    if device["fits"]:
        share = needed / device["usable"]
        yield f"{device['name']}: fits; the fullest rank takes {share:.0%} ({usable})"
        return
    ranks = ", ".join(map(str, device["pp_ranks_too_full"]))
    yield (
        f"{device['name']}: does not fit; pp rank {ranks} of up to {needed / GIB:.1f} GiB "
        f"({usable}). It would fit with"
    )
    yield from device["advice"]


def _short(unit: str) -> str:
    """Return a unit's name in a row: "output_layer", "mtp 0"."""
    if unit.startswith("mtp."):
        return unit.replace("layers.", "").replace(".", " ")
    return unit.rpartition(".")[2]


def _shortened(ranks: Sequence[int]) -> str:
    texts = [str(rank) for rank in ranks]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:3], "…", texts[-1]])


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
