"""Models that round their weights in the forward (``qat``): when, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from megatron_lightning.precision.served.qat import QAT, qat_of
from megatron_lightning.step.participant import StepBatch, StepParticipant
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.step_run import StepRun


class RoundedWeights(StepParticipant):
    """Begin to round at the step that the user has set, and round once a pipeline run. Under fsdp
    a full weight does not stay, and is rounded at every gather.

    Args:
        scope: The run context.
    """

    def __init__(self, scope: RunContext) -> None:
        self._module, self._context = scope.module, scope.context
        records = qat_of(scope.module).values()
        self._roundings = [r.rounding for r in records if r.rounding is not None]
        self._keeps = scope.part.units is None
        for rounding in self._roundings:
            if rounding.inputs is not None:
                # Notes of a step without a backward wait for the next one.
                rounding.inputs.is_shared = True
                scope.undo.callback(setattr, rounding.inputs, "is_shared", False)

    @classmethod
    def of(cls, scope: RunContext) -> Iterator[RoundedWeights]:
        """Yield the participant, if a model rounds."""
        if qat_of(scope.module):
            yield cls(scope)

    def begin_batch(self, batch: StepBatch) -> None:
        """Round or not, anew: hooks may have changed the weights."""
        self._forget()
        QAT.follow(self._module, self._module.trainer.global_step if batch.trains else None)

    def around_forward(
        self, run: StepRun, stage: int, microbatch: int
    ) -> AbstractContextManager[None]:
        """Return a context that keeps rounded weights."""
        return self._keeping()

    def around_backward(self, run: StepRun, microbatch: int) -> AbstractContextManager[None]:
        """Return a context that keeps rounded weights."""
        return self._keeping()

    def after_backward(self) -> None:
        """Drop the weights of the run, and share the largest inputs of all ranks."""
        self._forget()
        for rounding in self._roundings:
            if rounding.inputs is not None and not rounding.is_on:
                rounding.inputs.take(self._context.axis("world"), self._context.device)

    def end_batch(self, batch: StepBatch, output: Any) -> None:
        """Drop the weights of an evaluation. Lightning calls the backward of a training later."""
        if not batch.trains:
            self._forget()

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        with ExitStack() as contexts:
            for rounding in self._roundings if self._keeps else ():
                contexts.enter_context(rounding.keeping())
            yield

    def _forget(self) -> None:
        for rounding in self._roundings:
            rounding.forget()
