"""Simulated schedules of a search, each counted once. No torch here."""

from __future__ import annotations

from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline.schedules import SCHEDULES
from megatron_lightning.pipeline.schedules.replay import Replay
from megatron_lightning.planning.planned_run import PlannedRun
from megatron_lightning.planning.search.step_time import (
    simulated_microbatches,
)


class SimulatedSchedules:
    """Schedules of the layouts in a search.

    Args:
        recipe: The recipe of the search.

    Raises:
        ConfigError: For a recipe with a schedule of its own.
    """

    def __init__(self, recipe: PlannedRun) -> None:
        if recipe.schedule != "auto":
            raise ConfigError(
                f"pipeline_schedule is {recipe.schedule!r}, and a search compares layouts with "
                "1f1b and interleaved pipelines. Leave pipeline_schedule out."
            )
        self._replays: dict[tuple[int, int, int], Replay] = {}

    def replay(self, recipe: PlannedRun) -> Replay:
        """Return the schedule of a layout, over the simulated micro-batches.

        Raises:
            ConfigError: If the layout has no such schedule.
        """
        layout, count = recipe.layout, simulated_microbatches(recipe)
        key = layout.pp, layout.vpp, count
        if key not in self._replays:
            name = "1f1b" if layout.vpp == 1 else "interleaved"
            self._replays[key] = Replay(SCHEDULES[name](layout.pp, count, layout.vpp))
        return self._replays[key]
