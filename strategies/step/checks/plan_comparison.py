"""The comparison of tensor-parallel ranks in the first steps, as a participant."""

from __future__ import annotations

from torch import Tensor

from megatron_lightning.assembly.plan_watch import PlanWatch
from megatron_lightning.step.participant import StepParticipant
from megatron_lightning.step.step_run import StepRun


class PlanComparison(StepParticipant):
    """Find errors of a sharding plan without an effect on shapes.

    Args:
        watch: Records gradients, inputs, outputs and losses.
    """

    def __init__(self, watch: PlanWatch) -> None:
        self._watch = watch

    def returned(self, run: StepRun, microbatch: int, loss: Tensor | None) -> None:
        """Record a loss."""
        if loss is not None:
            self._watch.loss(loss)

    def after_backward(self) -> None:
        """Compare the records. A collective in the first steps."""
        self._watch.compare()
