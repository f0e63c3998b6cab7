"""Simulate one schedule with many costs. No torch here.

The order of actions does not depend on costs, so it is found once. A replay is then one pass over
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lightning.pipeline.schedules.actions import SENDS_GRADIENT, Action, Kind, Schedule
from megatron_lightning.pipeline.schedules.simulate import simulate


class Replay:
    """A schedule to simulate with several costs.

    Args:
        schedule: A table without split backwards.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        holders, spans = schedule.placement.pp_ranks, simulate(schedule).spans
        order = sorted(spans, key=spans.__getitem__)
        index = {action: number for number, action in enumerate(order)}
        self._steps = []
        for stage, kind, microbatch in order:
            is_forward = kind is Kind.FORWARD
            needed = stage - 1 if is_forward else stage + 1
            sender = next(
                (
                    index[message]
                    for other in ((Kind.FORWARD,) if is_forward else SENDS_GRADIENT)
                    if (message := Action(needed, other, microbatch)) in index
                ),
                -1,
            )
            travels = sender >= 0 and holders[needed] != holders[stage]
            self._steps.append((holders[stage], stage, is_forward, sender, travels))

    def run_time(
        self, forward: Sequence[float], backward: Sequence[float], communication: float
    ) -> float:
        """Return the time of a run.

        Args:
            forward: Time of a micro-batch's forward on each stage.
            backward: Time of a micro-batch's backward on each stage.
            communication: From the end of an action to the arrival of its message.
        """
        clock = [0.0] * len(self.schedule.actions)
        ends: list[float] = []
        for rank, stage, is_forward, sender, travels in self._steps:
            start = clock[rank]
            if sender >= 0:
                arrival = ends[sender] + communication if travels else ends[sender]
                start = max(start, arrival)
            end = start + (forward[stage] if is_forward else backward[stage])
            clock[rank] = end
            ends.append(end)
        return max(clock)
