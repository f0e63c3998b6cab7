"""Refuse optimizer steps by gradients of one rank, in manual optimization."""

from __future__ import annotations

from megatron_lightning.errors import ConfigError
from megatron_lightning.guards.guard import Fit, Guard
from megatron_lightning.step.run_context import RunContext


class UnreducedGradients(Guard):
    """Look for gradients beside ``manual_backward`` before every update."""

    sentence = (
        "a module that optimizes by hand steps by gradients that `manual_backward` has not "
        "computed: ranks would diverge, or the next backward would fail"
    )
    may_warn = False

    def __init__(self, scope: RunContext, fit: Fit | None = None) -> None:
        super().__init__(scope, fit)
        self._fit = fit

    @classmethod
    def applies(cls, scope: RunContext, fit: Fit | None) -> bool:
        """Return whether the module optimizes by hand."""
        return fit is not None and not scope.module.automatic_optimization

    def before_update(self) -> bool:
        """Look for gradients of this rank alone. Never a veto."""
        reducer = None if self._fit is None else self._fit.accumulation.reducer
        if reducer is None or reducer.is_finished:
            return True
        for name in reducer.bucket_of:
            if reducer.parameters[name].grad is not None:
                self._refuse(name)
                break
        return True

    def _refuse(self, name: str) -> None:
        self.judge.refuse(
            ConfigError(
                f"{type(self.scope.module).__name__} steps an optimizer by gradients of one rank "
                f"({name} has one): they come from loss.backward(), from torch.autograd.grad, or "
                "from a backward pass that toggle_model(sync_grad=False) has kept from the "
                "reduction. Call self.manual_backward(loss) before the step."
            )
        )
