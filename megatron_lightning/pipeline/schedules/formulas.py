"""Closed formulas of a schedule's cost, from the papers, to compare the simulation with. No torch
here.

Notation: P pipeline ranks, V chunks on each, M micro-batches, N micro-batches of a group. F, B, I
and W are the times of an action on a chunk, equal on all stages. Messages take no time. Tests
compare every formula with the simulation.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_lightning.pipeline.schedules.actions import Kind, Schedule
from megatron_lightning.pipeline.schedules.one_f_one_b import groups_fill, smallest_group_size
from megatron_lightning.pipeline.schedules.simulate import Costs


class Expected(NamedTuple):
    """Result of a formula."""

    step_time: float
    formula: str
    peak_in_flight: tuple[int, ...]
    """For each pp rank: the most (stage, micro-batch) activations held at once."""


def expected(schedule: Schedule, costs: Costs, group_size: int | None = None) -> Expected | None:
    """Return the cost of a schedule by the schedule's formula.

    Args:
        schedule: A table from a named generator.
        costs: Times of the actions.
        group_size: N of the interleaved schedule.

    Returns:
        None without a closed form: a user's own table, stages of unequal cost, messages with a
        duration, a last group below P, or (zero bubble) numbers excluded by the paper's derivation.
    """
    num_stages = schedule.placement.num_stages
    durations = costs.durations(num_stages)
    # Every form below is for equal stages without messages. Otherwise only the simulation knows.
    if costs.communication or any(len(set(times)) > 1 for times in durations.values()):
        return None
    f, b, i, w = (durations[kind][0] for kind in Kind)
    p, m = schedule.placement.num_ranks, schedule.num_microbatches
    v = num_stages // p
    n = group_size or smallest_group_size(p, m)
    # M + P - 1 slots of one chunk, and a further max(M, P) slots for each chunk more: with fewer
    # micro-batches than ranks, a rank waits until a micro-batch has come around.
    if schedule.name in {"gpipe", "1f1b"} or (
        schedule.name == "interleaved" and groups_fill(p, m, n)
    ):
        time = (max(m, p) * (v - 1) + m + p - 1) * (f + b)
        slots = "M + P - 1" if v == 1 else "MV + P - 1" if m >= p else "PV + M - 1"
        return Expected(time, f"({slots}) (F + B)", _held(schedule, v, n))
    # In the steady state the ranks never wait. Only filling and draining cost, and deferred W fill
    # a part of both.
    if schedule.name == "zb-h1" and w <= min(f, i) and m >= p:
        return Expected(
            m * (f + i + w) + (p - 1) * (f + i - w), "M (F + I + W) + (P - 1) (F + I - W)", (p,) * p
        )
    if schedule.name == "zbv" and f == i == w and m >= 2 * p - 1:
        return Expected(
            2 * m * (f + i + w) + (p - 1) * f, "2 M (F + I + W) + (P - 1) F", (2 * p,) * p
        )
    return None


def _held(schedule: Schedule, v: int, n: int) -> tuple[int, ...]:
    p, m = schedule.placement.num_ranks, schedule.num_microbatches
    if schedule.name == "gpipe":
        return (m * v,) * p
    if v == 1:
        return tuple(min(m, pp_rank + 1) for pp_rank in range(p))
    return tuple(min(m * v, 2 * pp_rank + (v - 1) * n + 1) for pp_rank in range(p))
