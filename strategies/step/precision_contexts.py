"""Contexts of the precision plugin around every forward and backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron_lightning.step.participant import StepBatch, StepParticipant
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.step_run import StepRun
from megatron_lightning.strategies.fp8 import quantizing


class PrecisionContexts(StepParticipant):
    """Enter the contexts of Lightning's precision plugin, and follow weights for quantized layers.

    Args:
        scope: The run context.
    """

    def __init__(self, scope: RunContext) -> None:
        plugin = scope.precision
        self._contexts = {
            "training_step": plugin.train_step_context,
            "validation_step": plugin.val_step_context,
            "test_step": plugin.test_step_context,
            "predict_step": plugin.predict_step_context,
        }
        self._backward = getattr(plugin, "backward_context", nullcontext)
        self._quantized = quantizing(plugin)

    def begin_batch(self, batch: StepBatch) -> None:
        """Drop quantized weights, since hooks may have changed the weights."""
        if self._quantized is not None and batch.trains:
            self._quantized.forget_weights()

    def around_forward(
        self, run: StepRun, stage: int, microbatch: int
    ) -> AbstractContextManager[Any]:
        """Return the plugin's context for a call of a step."""
        return self._contexts[run.hook]()

    def around_backward(self, run: StepRun, microbatch: int) -> AbstractContextManager[Any]:
        """Return the plugin's context for a backward."""
        context: AbstractContextManager[Any] = self._backward()
        return context

    def repeated(self) -> AbstractContextManager[None]:
        """Keep values of the block out of the histories of quantized layers."""
        return nullcontext() if self._quantized is None else self._quantized.without_notes()

    def rehearsed(self) -> AbstractContextManager[None]:
        """Do as :meth:`repeated`."""
        return self.repeated()


class UnitOrder(StepParticipant):
    """Make data-parallel ranks call the same FSDP2 units in the same order. With a single stage, a
    step may call the module in any way.

    Args:
        scope: The run context.
    """

    def __init__(self, scope: RunContext) -> None:
        self._units = scope.part.units

    def around_forward(
        self, run: StepRun, stage: int, microbatch: int
    ) -> AbstractContextManager[None]:
        """Return a context that compares the order of the calls of units between the ranks."""
        return nullcontext() if self._units is None else self._units.in_order(run.hook)
