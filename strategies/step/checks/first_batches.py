"""Checks in the first batch of every loader, and explanations of errors in all steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_lightning.assembly.replicas import check_same_batch
from megatron_lightning.assembly.shape_errors import explained_shapes
from megatron_lightning.strategies.step.checks.world_guard import WorldGuard
from megatron_lightning.strategies.step.participant import StepBatch, StepParticipant
from megatron_lightning.strategies.step.run_context import RunContext
from megatron_lightning.strategies.step.step_run import StepRun


class FirstBatches(StepParticipant):
    """Compare the first batch of a loader between the ranks of a replica, and watch the step for
    collectives over all ranks.

    Args:
        scope: The run context.
        guard: Watches the default process group.
    """

    def __init__(self, scope: RunContext, guard: WorldGuard) -> None:
        self._scope = scope
        self._plans = scope.part.plans.applied
        self._guard = guard
        self._checked: set[tuple[Any, ...]] = set()
        self._is_first = False

    def begin_batch(self, batch: StepBatch) -> None:
        """Check the first batch of a loader."""
        loader = (batch.hook, *batch.loader)
        self._is_first = loader not in self._checked
        if self._is_first:
            check_same_batch(batch.value, self._scope.context)
            self._checked.add(loader)

    @contextmanager
    def around_forward(self, run: StepRun, stage: int, microbatch: int) -> Iterator[None]:
        """Explain shape errors caused by the sharding plan, and guard the step."""
        module = self._scope.module
        counts = module.automatic_optimization or run.hook != "training_step"
        watch = self._guard.watching if self._is_first else self._guard.counting
        guarded = watch(run.hook, counts=counts)
        with explained_shapes(module, self._plans, self._scope.context), guarded:
            yield
