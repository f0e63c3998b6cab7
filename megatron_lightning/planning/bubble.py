"""The bubble of a pipeline in a plan, by simulation. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_lightning.pipeline.schedules import ScheduleChoice
from megatron_lightning.pipeline.schedules.actions import Schedule
from megatron_lightning.pipeline.schedules.simulate import Costs, simulate


def describe_bubble(
    choice: ScheduleChoice, table: Schedule, works: Sequence[float]
) -> dict[str, Any]:
    """Return a plan's section on the schedule, with the bubble of a simulated run.

    Args:
        choice: The schedule, and the reason for it.
        table: The schedule's table.
        works: Operations of every stage. Simulated times are in proportion.
    """
    mean = sum(works) / len(works)
    times = tuple(work / mean if mean else 1.0 for work in works)
    simulation = simulate(table, Costs(forward=times, input_gradient=times, weight_gradient=times))
    return {
        "schedule": choice.name,
        "reason": choice.reason,
        "num_microbatches": table.num_microbatches,
        "share": simulation.bubble,
        "peak_in_flight": list(simulation.peak_in_flight),
    }
