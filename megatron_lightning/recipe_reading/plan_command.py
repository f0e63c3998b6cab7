"""The command ``megatron-lightning plan``: effects of a configuration file before the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from megatron_lightning.errors import ConfigError
from megatron_lightning.mistakes import Errors
from megatron_lightning.planning.plan_report import describe, describe_fit, report_text
from megatron_lightning.planning.planned_run import MeasuredRecipe, PlannedRun, Recipe
from megatron_lightning.planning.search.devices import PlannedDevice, planned_device
from megatron_lightning.printed_json import json_text
from megatron_lightning.recipe_reading.recipe_reader import read_recipe
from megatron_lightning.recipe_reading.step_plan import step_sections, step_text

_SECTIONS = ("grid", "stages", "bytes", "flops", "bubble")


def plan(
    *,
    config: str | Sequence[str],
    overrides: Sequence[str] = (),
    world_size: int | None = None,
    device: str | None = None,
    image_tokens: int | None = None,
    search: bool = False,
    json: bool = False,
) -> tuple[str, bool]:
    """Show the effects of a configuration file: rank grid, stages, memory, operations and bubble.
    With another optimizer than AdamW also what owners of full tensors send and keep in a step, and
    the groups of maximal updates.

    Nothing is started, and no weights are made.

    Args:
        config: Path to a configuration file of `megatron-lightning fit`. With several files, later
            files win.
        overrides: Options of `megatron-lightning fit` that win over files, as trainer.devices=8.
            --trainer.devices=8 is equivalent.
        world_size: Number of ranks. Default: the Trainer's num_nodes x devices.
        device: Say whether every rank fits into this device, and suggest changes if not: h100,
            h200, b200, a100, or cpu:GIB.
        image_tokens: Tokens of the images of a sample, of a model with a tower of images. Default:
            all tokens of a sample.
        search: List the layouts that fit into the device, the fastest first, instead of the
            recipe's own.
        json: Print JSON with the keys grid, stages, bytes, flops, bubble and errors, and where they
            apply owners and param_groups, or search and errors.

    Returns:
        The text, and whether the configuration has no errors and fits into the device.

    Raises:
        ConfigError: For an unknown device, and for a search without a device.
    """
    errors = Errors()
    target = None if device is None else planned_device(device)
    paths = [config] if isinstance(config, str) else config
    recipe = read_recipe(paths, overrides, world_size, errors, image_tokens=image_tokens)
    if search:
        return _search(recipe, target, errors, as_json=json)
    sections_found = None if recipe is None else describe(recipe, errors)
    if sections_found is not None and recipe is not None:
        of_step = step_sections(recipe, errors)
        sections_found = None if errors.found else {**sections_found, **of_step}
    # The exit status says whether the plan holds: no mistake, and room on the device.
    fits = True
    if sections_found is not None and recipe is not None and target is not None:
        sections_found["device"] = describe_fit(recipe, target, sections_found["bytes"]["pp_ranks"])
        fits = sections_found["device"]["fits"]
    sections: dict[str, Any] = (
        dict.fromkeys(_SECTIONS) if sections_found is None else sections_found
    )
    if json:
        text = json_text({**sections, "errors": errors.found})
    elif sections_found is None:
        text = "\n".join(f"error: {message}" for message in errors.found)
    else:
        text = "\n".join([*report_text(sections_found), *step_text(sections_found)])
    return text, sections_found is not None and fits


def _search(
    recipe: PlannedRun | None, device: PlannedDevice | None, errors: Errors, *, as_json: bool
) -> tuple[str, bool]:
    """Return the text of a search, and whether a layout fits."""
    if device is None:
        raise ConfigError(
            "a search lists layouts that fit into a device, and none is named. Add --device h100, "
            "h200, b200, a100, or cpu:GIB with the memory of a rank."
        )
    # Other plans do not wait for this import.
    from megatron_lightning.planning.search.search_report import search_sections, search_text

    result = None
    if recipe is not None:
        result = errors.attempt(lambda: _searcher(recipe, device).run())
    if as_json:
        sections = None if result is None else search_sections(result, device)
        text = json_text({"search": sections, "errors": errors.found})
    elif result is None or recipe is None:
        text = "\n".join(f"error: {message}" for message in errors.found)
    else:
        text = "\n".join(search_text(result, device, recipe.world_size))
    return text, result is not None and bool(result.layouts)


def _searcher(recipe: PlannedRun, device: PlannedDevice) -> Any:
    """Return the search for a recipe's kind of model."""
    from megatron_lightning.planning.measured.measured_search import MeasuredSearch
    from megatron_lightning.planning.search.layout_search import LayoutSearch

    if isinstance(recipe, MeasuredRecipe):
        return MeasuredSearch(recipe, device)
    return LayoutSearch(cast("Recipe", recipe), device)
