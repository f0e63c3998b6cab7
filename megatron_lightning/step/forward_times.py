"""Times of the forwards of Lightning's own step, for callbacks. Pipeline runs have observers
instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import lightning.pytorch as pl

from megatron_lightning.pipeline.schedules.actions import Action, Kind
from megatron_lightning.pipeline.timeline import Timeline
from megatron_lightning.step.participant import StepParticipant
from megatron_lightning.step.step_run import StepRun


@runtime_checkable
class StepWatch(Protocol):
    """Callback for recording the actions of selected steps."""

    timeline: Timeline | None
    """Records the current batch. None: no recording."""


def step_watches(trainer: pl.Trainer) -> list[StepWatch]:
    """Return the callbacks for recording actions."""
    callbacks: list[object] = getattr(trainer, "callbacks", [])
    return [callback for callback in callbacks if isinstance(callback, StepWatch)]


class ForwardTimes(StepParticipant):
    """Record the user's step alone, without the collectives before and after the step.

    Args:
        watches: The callbacks.
    """

    def __init__(self, watches: Sequence[StepWatch]) -> None:
        self._watches = watches

    @contextmanager
    def around_forward(self, run: StepRun, stage: int, microbatch: int) -> Iterator[None]:
        """Around the user's step."""
        timelines = [watch.timeline for watch in self._watches if watch.timeline is not None]
        action = Action(stage, Kind.FORWARD, microbatch)
        for timeline in timelines:
            timeline.begin(action)
        yield
        for timeline in timelines:
            timeline.end(action)
