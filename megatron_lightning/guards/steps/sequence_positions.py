"""Refuse steps that select positions in a rank's part of a sequence, and warn of reductions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_lightning.guards.guard import Fit, Guard
from megatron_lightning.guards.watches.position_watch import PositionWatch
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.step_run import StepRun
from megatron_lightning.step.values.sequence_parts import calls_with_positions, sequence_split

_PACKAGE = "megatron_lightning."


class SequencePositions(Guard):
    """Watch the first forward of every kind of step on the last stage."""

    sentence = (
        "context parallelism: a step shifts, indexes or reduces a sequence, of which each rank "
        "holds a part"
    )

    def __init__(self, scope: RunContext, fit: Fit | None = None) -> None:
        super().__init__(scope, fit)
        self._split = sequence_split(scope)
        module = scope.module
        self._models = {path: module.get_submodule(path) for path in calls_with_positions(scope)}
        self._begun: set[str] = set()

    @classmethod
    def applies(cls, scope: RunContext, fit: Fit | None) -> bool:
        """Return whether ranks share sequences."""
        return scope.context.cp.size > 1

    @contextmanager
    def around_forward(self, run: StepRun, stage: int, microbatch: int) -> Iterator[None]:
        """Watch the tensors of a forward."""
        hook, module = run.hook, self.scope.module
        # Steps of this package exchange what they reduce.
        is_users = not getattr(type(module), hook).__module__.startswith(_PACKAGE)
        is_due = hook not in self._begun and stage == run.last_stage and is_users
        parts = self._split.parts(run.microbatches[microbatch]) if is_due else []
        if not parts or not self._models or "" in self._models:
            yield
            return
        self._begun.add(hook)
        watch = PositionWatch(hook, self.scope.context.cp.size, parts, self.judge)
        with watch.watching(self._models):
            yield
