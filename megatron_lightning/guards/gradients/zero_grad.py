"""A user's ``optimizer_zero_grad`` that does not clear the gradients.

On one device gradients then pile up. With gradients in buckets, or with a pipeline that computes
gradients before Lightning calls the hook, a step begins without gradients, and the hook would have
no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.guards.guard import Fit, Guard
from megatron_lightning.optim.gradients.gradient_proxies import StandIn, StandIns
from megatron_lightning.step.overrides import override, unwrapped, users_methods
from megatron_lightning.step.run_context import RunContext


class ZeroGrad(Guard):
    """Look whether the hook clears the gradients of earlier backward passes."""

    sentence = (
        "`optimizer_zero_grad` leaves the gradients of a batch, which would pile up on one device: "
        "here every step begins without gradients"
    )

    def __init__(self, scope: RunContext, fit: Fit) -> None:
        super().__init__(scope, fit)
        self._is_left = False  # whether one device would have gradients of earlier steps
        self._is_cleared = False  # whether steps begin without gradients, whatever the hook does
        self._module = scope.module
        self._accumulation = fit.accumulation
        self._undo = scope.undo
        self._stand_ins = StandIns(self._use)
        self._followed = list[Any]()
        override(scope.module, "optimizer_zero_grad", self._check, scope.undo)
        override(scope.module, "zero_grad", self._clear, scope.undo)

    @classmethod
    def applies(cls, scope: RunContext, fit: Fit | None) -> bool:
        """Return whether user code clears gradients in a fit."""
        return fit is not None and bool(users_methods(scope.module, "optimizer_zero_grad"))

    def backward_begins(self, *, clear: bool, keep_earlier: bool) -> None:
        """Follow whether the strategy clears gradients itself."""
        self._is_cleared = clear or self._accumulation.managed

    def gradients_ready(self) -> None:
        """Gradients exist until something clears them."""
        self._is_left = True

    def _clear(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._is_left = False
        return original(*args, **kwargs)

    def _use(self, stand_in: StandIn, func: Callable[..., Any]) -> None:
        """Accept ``p.grad.zero_()``: zeros stay without a gradient."""
        if func is Tensor.zero_:
            self._is_left = False

    def _follow(self, optimizer: Any) -> None:
        """Follow the ``zero_grad`` of an optimizer and of Lightning's wrapper."""
        handed_out: Any = self._module.optimizers()
        wrappers = handed_out if isinstance(handed_out, list) else [handed_out]
        for handle in [optimizer, *(w for w in wrappers if unwrapped(w) is optimizer)]:
            if not any(handle is followed for followed in self._followed):
                self._followed.append(handle)
                override(handle, "zero_grad", self._clear, self._undo)

    def _check(self, original: Callable[..., Any], epoch: int, index: int, optimizer: Any) -> None:
        """Call the hook.

        Raises:
            ConfigError: If the hook leaves gradients.
        """
        self._follow(unwrapped(optimizer))
        parameters = list(self._module.parameters())
        self._stand_ins.show(parameters)
        self._stand_ins.replace_missing(parameters)
        try:
            original(epoch, index, optimizer)
        finally:
            if self._stand_ins.remove():  # parameter by parameter
                self._is_left = False
        if self._is_cleared and self._is_left:
            self.judge.refuse(
                ConfigError(
                    f"{type(self._module).__name__}.optimizer_zero_grad did not call "
                    f"optimizer.zero_grad() before batch {index}, but every step begins without "
                    "gradients here, so that they would not pile up. Call optimizer.zero_grad() in "
                    "every call, and add up the gradients of several batches by "
                    "Trainer(accumulate_grad_batches=...)."
                )
            )
