"""Gradients that a manual optimizer step sees a second time, since nothing has cleared them.

On one device ``p.grad = None`` clears gradients. With sharded gradients ``p.grad`` is None on every
parameter already. The guard follows such a loop in ``training_step`` alone. A loop in a hook
reaches nothing, and gradients of earlier steps are added to the next gradients. Assigning None to
None leaves no trace, so the result is looked at. Code that means to accumulate beyond a step looks
the same, and is right: the run goes on, with a warning.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from megatron_lightning.guards.guard import Fit, Guard
from megatron_lightning.optim.gradients.gradient_proxies import gradient_of
from megatron_lightning.step.run_context import RunContext


class _Mark(NamedTuple):
    """A gradient at a point in time."""

    gradient: Tensor
    version: int


class LeftGradients(Guard):
    """Follow the gradients from a step over the next backward pass to the next step."""

    sentence = (
        "manual optimization steps by gradients that nothing has cleared since the last step: "
        "`p.grad = None` in a hook does not reach sharded gradients"
    )

    def __init__(self, scope: RunContext, fit: Fit) -> None:
        super().__init__(scope, fit)
        self._module = scope.module
        self._accumulation = fit.accumulation
        self._marks: dict[str, _Mark] = {}  # gradients stepped before
        self._left: set[str] = set()  # names of gradients that hold gradients stepped before
        self._has_warned = False

    @classmethod
    def applies(cls, scope: RunContext, fit: Fit | None) -> bool:
        """Return whether a fit optimizes sharded gradients by hand."""
        is_manual = not scope.module.automatic_optimization
        return fit is not None and fit.accumulation.managed and is_manual

    def backward_begins(self, *, clear: bool, keep_earlier: bool) -> None:
        """Find the stepped gradients that are added to the next gradients."""
        if not keep_earlier or not self._marks:  # several backward passes before a step
            return
        marks = self._current(self._marks)
        self._left = {name for name, mark in self._marks.items() if _is_same(mark, marks.get(name))}
        self._marks = {}

    def gradients_ready(self) -> None:
        """Mark the gradients with added gradients of earlier steps."""
        if self._left:
            self._marks = self._current(self._left)

    def step_begins(self, optimizer: Any) -> None:
        """Warn once if the optimizer is about to step gradients of an earlier step again."""
        if self._has_warned or not self._left:
            return
        names = sorted(self._left & self._current(self._names(optimizer)).keys())
        if not names:
            return
        self._has_warned = True
        self.judge.warn(
            f"{type(self._module).__name__} steps {type(optimizer).__name__} by gradients that it "
            f"has stepped before ({names[0]} is the first of {len(names)}): nothing has cleared "
            "them, so that the gradients of all steps add up, as on one device without zero_grad. "
            "p.grad = None in a hook does not clear gradients that are sharded over ranks. Call "
            "optimizer.zero_grad() before each backward pass of a new step."
        )

    def step_ends(self, optimizer: Any) -> None:
        """Mark the gradients stepped by the optimizer."""
        names = self._names(optimizer)
        self._left -= names
        self._marks |= self._current(names)

    def _names(self, optimizer: Any) -> set[str]:
        is_known = isinstance(optimizer, Optimizer) and self._accumulation.managed
        return self._accumulation.view(optimizer).names if is_known else set()

    def _current(self, names: Any) -> dict[str, _Mark]:
        """Return the gradients that ``p.grad = None`` does not reach."""
        parameters = {id(parameter) for parameter in self._module.parameters()}
        marks = {}
        for name, target in self._accumulation.reducer.targets().items():
            gradient = gradient_of(target)
            if name in names and gradient is not None and id(target) not in parameters:
                marks[name] = _Mark(gradient, gradient._version)
        return marks


def _is_same(mark: _Mark, now: _Mark | None) -> bool:
    """Whether a gradient was neither cleared nor zeroed."""
    return now is not None and mark.gradient is now.gradient and mark.version == now.version
