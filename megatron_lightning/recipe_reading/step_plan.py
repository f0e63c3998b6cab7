"""The optimizer step in a plan: owners of full tensors, and groups of maximal updates.

Torch is imported by the call, if a recipe names another optimizer than AdamW or maximal updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_lightning.mistakes import Errors
from megatron_lightning.planning.planned_run import PlannedRun, Recipe


def step_sections(recipe: PlannedRun, errors: Errors) -> dict[str, Any]:
    """Return the sections ``owners`` and ``param_groups`` of a recipe, where it has them."""
    is_plain = recipe.optimizer is None and recipe.maximal_update is None
    if is_plain or not isinstance(recipe, Recipe) or recipe.adapters is not None:
        return {}
    from megatron_lightning.recipe_reading.planned_optimizer import PlannedOptimizer

    planned = errors.attempt(PlannedOptimizer, recipe)
    if planned is None:
        return {}
    owners = errors.attempt(planned.owners)
    groups = errors.attempt(planned.groups)
    sections = {"owners": owners, "param_groups": groups}
    return {name: section for name, section in sections.items() if section}


def step_text(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the sections."""
    if "owners" in found:
        yield ""
        yield from found["owners"]["text"]
    for group in found.get("param_groups", ()):
        yield f"{group['optimizer']}, group {group['name']}: {group['parameters']:,} parameters"
