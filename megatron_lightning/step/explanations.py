"""Explanations of errors of torch in the user's step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_lightning.assembly.checks.shape_errors import explained_shapes
from megatron_lightning.step.participant import StepParticipant
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.step_run import StepRun


class Explanations(StepParticipant):
    """Explain shape errors caused by the sharding plan.

    Args:
        scope: The run context.
    """

    def __init__(self, scope: RunContext) -> None:
        self._scope = scope
        self._plans = scope.part.plans.applied

    @contextmanager
    def around_forward(self, run: StepRun, stage: int, microbatch: int) -> Iterator[None]:
        """Explain an error of the step."""
        with explained_shapes(self._scope.module, self._plans, self._scope.context):
            yield
