"""A user's ``optimizer_zero_grad`` that does not clear the gradients.

On one device gradients then pile up. With gradients in buckets, or with a pipeline that computes
gradients before Lightning calls the hook, a step begins without gradients, and the hook would have
no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.gradients.gradient_proxies import StandIn, StandIns
from megatron_lightning.step.overrides import override, users_methods
from megatron_lightning.strategies.step.gradients.manual import unwrapped


class ZeroingCheck:
    """Look whether the hook clears the gradients of earlier backward passes.

    Args:
        module: The LightningModule, with automatic optimization.
        undo: Ends the check.
    """

    def __init__(self, module: pl.LightningModule, undo: ExitStack) -> None:
        self.is_left = False
        """Whether one device would have gradients of earlier steps."""
        self.applies = False
        """Whether steps begin without gradients, whatever the hook does."""
        self._module = module
        hooks = [hook for _, hook in users_methods(module, "optimizer_zero_grad")]
        self._undo = undo
        if not hooks:
            return
        self._stand_ins = StandIns(self._use)
        self._followed = list[Any]()
        override(module, "optimizer_zero_grad", self._check, undo)
        override(module, "zero_grad", self._clear, undo)

    def _clear(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.is_left = False
        return original(*args, **kwargs)

    def _use(self, stand_in: StandIn, func: Callable[..., Any]) -> None:
        """Accept ``p.grad.zero_()``: zeros stay without a gradient."""
        if func is Tensor.zero_:
            self.is_left = False

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
                self.is_left = False
        if self.applies and self.is_left:
            raise ConfigError(
                f"{type(self._module).__name__}.optimizer_zero_grad did not call "
                "optimizer.zero_grad() before batch "
                f"{index}, but every step begins without gradients here, so that they would not "
                "pile up. Call optimizer.zero_grad() in every call, and add up the gradients of "
                "several batches by Trainer(accumulate_grad_batches=...)."
            )
