"""Layouts of a measured module that fit into a device, the fastest class first. No torch here.

A measured module has tensor, pipeline and data parallelism. All layouts are counted, since a module
has few of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_lightning.config import RecomputeOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.planning.measured.measured_layout import (
    MeasuredLayout,
    Stages,
    check_measured,
)
from megatron_lightning.planning.planned_run import MeasuredRecipe
from megatron_lightning.planning.search.device_speeds import Speeds
from megatron_lightning.planning.search.devices import PlannedDevice
from megatron_lightning.planning.search.layout_search import (
    FULL,
    MICRO_BATCHES,
    MOST_STAGES_RANKS,
    NOTHING,
    SECOND,
    FoundLayout,
    SearchResult,
    data_modes,
    divisors,
    powers_of_two,
    without_fsdp,
)
from megatron_lightning.planning.search.simulated import SimulatedSchedules

_CHUNKS = (1, 2, 4)


class MeasuredSearch:
    """Search of the layouts of a measured module.

    Args:
        recipe: Model, global batch, number of ranks, and what a search leaves as it is.
        device: The device.

    Raises:
        ConfigError: For a recipe with a schedule of its own.
    """

    def __init__(self, recipe: MeasuredRecipe, device: PlannedDevice) -> None:
        self._recipe = recipe
        self._device = device
        self._speeds = Speeds.of_device(device.name)
        self._schedules = SimulatedSchedules(recipe)
        self._splits: dict[tuple[int, int], Stages | None] = {}

    def run(self) -> SearchResult:
        """Return the layouts that fit."""
        candidates = list(self._candidates())
        layouts_found = [one for recipe in candidates if (one := self._found(recipe)) is not None]
        fitting = [one for one in layouts_found if one.fits(self._device)]
        fitting.sort(key=lambda one: one.time.seconds)
        # Of a layout that fits, only the least recomputation counts.
        least: dict[object, FoundLayout] = {}
        for one in fitting:
            key = replace(one.recipe, recompute=NOTHING)
            least.setdefault((key.layout, key.micro_batch_size, key.data_parallel, key.data), one)
        layouts = list(least.values())
        fastest = layouts[0].time.seconds if layouts else 0.0
        layouts_shown = tuple(one for one in layouts if one.time.seconds <= SECOND * fastest)
        own_layout = fitting_own = self._found(self._recipe)
        if own_layout is not None and not own_layout.fits(self._device):
            smaller = self._found(replace(self._recipe, recompute=FULL))
            fitting_own = smaller if smaller is not None and smaller.fits(self._device) else None
        return SearchResult(layouts_shown, own_layout, fitting_own, len(candidates))

    def _found(self, recipe: MeasuredRecipe) -> FoundLayout | None:
        """Return memory and time of a layout, or None if it cannot run."""
        stages = self._split(recipe.layout)
        if stages is None:
            return None
        try:
            replay, grid = self._schedules.replay(recipe), check_measured(recipe)
        except ConfigError:
            return None
        layout = MeasuredLayout(recipe, grid, stages, replay.schedule)
        return FoundLayout(recipe, layout.memory(), layout.time(replay, self._speeds))

    def _split(self, layout: ParallelLayout) -> Stages | None:
        key = layout.pp, layout.vpp
        if key not in self._splits:
            self._splits[key] = self._recipe.model.stages(*key, self._recipe.pipeline)
        return self._splits[key]

    def _candidates(self) -> Iterator[MeasuredRecipe]:
        """Yield every layout that divides ranks, units and batch."""
        recipe = self._recipe
        sizes = sorted({*MICRO_BATCHES, recipe.micro_batch_size})
        recomputed: list[RecomputeOptions] = [NOTHING, FULL] if recipe.model.units else [NOTHING]
        for layout in self._layouts():
            replicas = recipe.world_size // (layout.tp * layout.pp)
            batch_size, remainder = divmod(recipe.global_batch_size, replicas * recipe.accumulated)
            if remainder or not batch_size:
                continue
            base = replace(
                recipe, layout=layout, batch_size=batch_size, data_parallel="zero1",
                data=without_fsdp(recipe.data),
            )  # fmt: skip
            for size in {*sizes, batch_size} if layout.pp == 1 else set(sizes):
                if batch_size % size:
                    continue
                for mode in data_modes(base, replicas):
                    for recompute in recomputed:
                        yield replace(mode, micro_batch_size=size, recompute=recompute)

    def _layouts(self) -> Iterator[ParallelLayout]:
        recipe = self._recipe
        world, num_units = recipe.world_size, max(1, len(recipe.model.units))
        for tp in powers_of_two(recipe.node_size, recipe.layout.tp):
            if world % tp or recipe.model.parameters(tp) is None:
                continue
            for pp in divisors(world // tp):
                if pp > min(MOST_STAGES_RANKS, num_units):
                    break
                for vpp in _CHUNKS if pp > 1 else (1,):
                    layout = replace(
                        recipe.layout, tensor_model_parallel_size=tp,
                        pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp,
                        context_parallel_size=1,
                    )  # fmt: skip
                    if pp * vpp <= num_units and self._split(layout) is not None:
                        yield layout
