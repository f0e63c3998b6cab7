"""Response to infinities and NaN: an error, or no optimizer step."""

from __future__ import annotations

from torch import Tensor

from megatron_lightning.config import NonFinite
from megatron_lightning.optim.finite_watch import FiniteWatch
from megatron_lightning.optim.loss_scale import DynamicLossScale
from megatron_lightning.step.participant import StepParticipant
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.step_run import StepRun


class FiniteCheck(StepParticipant):
    """Look at losses, stage outputs and gradients, and refuse the step if a value is not finite.

    Args:
        scope: The run context.
        policy: Response to a finding.
        scale: Scale of the losses. Gradients may overflow under the scale. None: no scale.
    """

    vetoes = True

    def __init__(
        self, scope: RunContext, policy: NonFinite, scale: DynamicLossScale | None
    ) -> None:
        watch = FiniteWatch(scope.context, scope.options.layout.num_stages, policy=policy)
        self._module = scope.module
        self._watch = watch
        self._scale = scale
        self._is_native = scope.options.is_native
        self.observer = watch
        self._found = False  # a non-finite value since the last optimizer step
        self._judged = False  # by an optimizer step, since the finding
        self.follow_parameters()
        scope.undo.callback(watch.detach)

    def follow_parameters(self) -> None:
        """Watch the gradients of the currently trained parameters."""
        parameters: dict[str, Tensor] = dict(self._module.named_parameters())
        scale = self._scale
        self._watch.attach(parameters, lambda: scale is None or scale.is_lowest)

    def begin(self, run: StepRun) -> None:
        """Follow hooks that the user has registered on gradients since the last run."""
        if run.hook == "training_step":
            self._watch.follow_hooks()

    def returned(self, run: StepRun, microbatch: int, loss: Tensor | None) -> None:
        """Record the loss of Lightning's own step. Pipeline runs have observers."""
        if self._is_native and loss is not None:
            self._watch.loss(loss)

    def after_backward(self) -> None:
        """Check the recorded values. A collective."""
        self._found &= not self._judged
        self._judged = False
        self._found |= self._watch.check(self._module.trainer.global_step)

    def before_update(self) -> bool:
        """Return whether everything was finite."""
        return not self._found

    def after_update(self, *, stepped: bool) -> None:
        """Begin anew. Optimizers stepped by the module may share a backward pass. The verdict then
        holds for all these optimizers.
        """
        self._judged = True
        if self._module.automatic_optimization:
            self._found = False
