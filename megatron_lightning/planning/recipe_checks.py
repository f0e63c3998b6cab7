"""Checks of a recipe's sizes against each other, and the bytes of a recipe. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lightning import rules
from megatron_lightning.mistakes import Errors
from megatron_lightning.parallel.grid.grid import RankGrid
from megatron_lightning.pipeline.schedules.actions import Schedule
from megatron_lightning.planning.ledger.layer_tapes import Sizes
from megatron_lightning.planning.ledger.precision_bytes import precision_of
from megatron_lightning.planning.memory import Memory, Training, count_memory
from megatron_lightning.planning.planned_run import Recipe


def check_sizes(recipe: Recipe, errors: Errors) -> RankGrid | None:
    """Return the grid of a recipe's ranks. ``errors`` takes everything that does not fit together,
    apart from the schedule.
    """
    grid = errors.attempt(RankGrid, recipe.layout, recipe.world_size)
    errors.attempt(
        rules.check_model_layout,
        recipe.model,
        recipe.layout,
        recipe.world_size,
        sequence_length=recipe.sequence_length,
        pipeline=recipe.pipeline,
    )
    errors.attempt(rules.check_trained_experts, recipe.model, recipe.layout)
    errors.attempt(
        rules.check_attention_backend,
        recipe.model,
        recipe.layout.cp,
        device=recipe.device,
        precision=recipe.precision,
    )
    errors.attempt(rules.check_levels, recipe.context, recipe.layout.cp)
    compiles = recipe.compile is not None
    errors.attempt(rules.check_chunks, recipe.context, recipe.layout.cp, compiles=compiles)
    if recipe.layout.cp > 1:
        errors.attempt(rules.check_cp_comm_heads, recipe.model, recipe.layout, recipe.context)
    if grid is not None:
        errors.attempt(rules.check_data_parallel, grid, recipe.data_parallel, recipe.data)
    return grid


def recipe_sizes(recipe: Recipe, *, splits_backward: bool) -> Sizes:
    """Return the sizes behind the bytes of a micro-batch.

    Raises:
        ConfigError: For a precision without formulas.
    """
    return Sizes(
        config=recipe.model,
        layout=recipe.layout,
        precision=precision_of(recipe.precision),
        device=recipe.device,
        sequence_length=recipe.sequence_length,
        micro_batch_size=recipe.micro_batch_size,
        split_backward=splits_backward,
        compiled=recipe.compile is not None,
        fp8_recipe=recipe.fp8_recipe,
    )


def recipe_memory(
    recipe: Recipe, grid: RankGrid, table: Schedule, stages: Sequence[Sequence[str]]
) -> Memory:
    """Return the bytes on the ranks of a checked recipe.

    Args:
        recipe: The recipe.
        grid: The recipe's ranks.
        table: Schedule of a pipeline run.
        stages: Units of every stage.

    Raises:
        ConfigError: For a precision without formulas.
    """
    sizes = recipe_sizes(recipe, splits_backward=table.splits_backward)
    training = Training(
        grid=grid,
        data_parallel=recipe.data_parallel,
        data=recipe.data,
        recompute=recipe.recompute,
        adapters=recipe.adapters,
        rounds_weights=recipe.rounds_weights,
        tower=recipe.tower,
    )
    return count_memory(sizes, training, table, stages)
