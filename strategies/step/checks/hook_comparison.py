"""Comparison of the views of the user's hooks, as a participant."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from megatron_lightning.assembly.hook_watch import HookWatch
from megatron_lightning.strategies.step.participant import StepBatch, StepParticipant
from megatron_lightning.strategies.step.run_context import RunContext


class HookComparison(StepParticipant):
    """Find hooks that see a shard of the rank, in the first batch after the hook's registration.

    Args:
        scope: The run context.
    """

    def __init__(self, scope: RunContext) -> None:
        self._watch = HookWatch(scope.module, scope.part, scope.context)
        scope.undo.callback(self._watch.detach)

    def begin_batch(self, batch: StepBatch) -> None:
        """Look for new hooks."""
        if batch.begins_loop or batch.compares:
            self._watch.begin()

    def repeated(self) -> AbstractContextManager[None]:
        """Do not record."""
        return self._watch.paused()

    def rehearsed(self) -> AbstractContextManager[None]:
        """Do not record."""
        return self._watch.paused()

    def after_backward(self) -> None:
        """Compare the records of training."""
        self._watch.compare()

    def end_batch(self, batch: StepBatch, output: Any) -> None:
        """Compare the records of an evaluation."""
        if not batch.trains:
            self._watch.compare()
