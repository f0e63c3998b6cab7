"""When each action of a pipeline step ran: the executed schedule, to be laid beside the simulated one.

Starts are taken when an action's message has arrived, so that waiting shows as idle time. On a CUDA device the times are the
device's (events on the stream that computes), elsewhere the clock's. Times are seconds since :meth:`Timeline.restart`; ranks
that restart together, after a barrier, have comparable times.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from megatron_lightning.pipeline.actions import Action


class Interval(NamedTuple):
    """One executed action."""

    action: Action
    start_s: float
    end_s: float


class Timeline:
    """Recorder that a :class:`PipelineExecutor` calls around every action.

    Args:
        device: Where the stages compute.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._cuda = torch.device(device).type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Forget what was recorded; times count from here."""
        self._marks: list[tuple[Action, Any, Any]] = []
        self._action: Action | None = None
        self._zero = self._start = self._now()

    def begin(self, action: Action) -> None:
        """Note that ``action`` has what it waits for, and starts."""
        self._action, self._start = action, self._now()

    def end(self) -> None:
        """Note that the action begun last is done."""
        if self._action is not None:
            self._marks.append((self._action, self._start, self._now()))

    def intervals(self) -> list[Interval]:
        """Return what was recorded, in order; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        return [Interval(action, self._since_zero(start), self._since_zero(end)) for action, start, end in self._marks]

    def _now(self) -> Any:
        """Return a mark: seconds, or an event on the stream that computes."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _since_zero(self, mark: Any) -> float:
        return float(self._zero.elapsed_time(mark)) / 1e3 if self._cuda else float(mark - self._zero)
