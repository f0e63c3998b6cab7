"""Record when each action of a pipeline run was executed, to compare with the simulated schedule.

An action starts when the action's message has arrived, so that waiting shows as idle time. On a
CUDA device the times are the device's (events on the computing stream), elsewhere the clock's.
Times are seconds since :meth:`Timeline.restart`. Ranks that restart together, after a barrier, have
comparable times.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from megatron_lightning.pipeline.schedules.actions import Action


class Timeline:
    """Observer of a :class:`PipelineExecutor`: records when each action ran.

    Args:
        device: Device of the stages.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._cuda = torch.device(device).type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Clear the record. Times count from here."""
        self._marks: list[tuple[Action, Any, Any]] = []
        self._zero = self._start = self._now()

    def begin(self, action: Action) -> None:
        """Record the start of ``action``."""
        self._start = self._now()

    def end(self, action: Action, outputs: object = None) -> None:
        """Record the end of ``action``."""
        self._marks.append((action, self._start, self._now()))

    def intervals(self) -> list[tuple[Action, float, float]]:
        """Return every action with start and end in seconds, in order. Waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        return [
            (action, self._since_zero(start), self._since_zero(end))
            for action, start, end in self._marks
        ]

    def _now(self) -> Any:
        """Return a mark: seconds, or an event on the computing stream."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _since_zero(self, mark: Any) -> float:
        return (
            float(self._zero.elapsed_time(mark)) / 1e3 if self._cuda else float(mark - self._zero)
        )
