"""Gradients withheld from a user's code on ranks without a gradient. A read of a withheld gradient
is an error.

Under ``zero1`` and ``fsdp``, ``p.grad`` is None. ``clip_grad_norm_`` would clip nothing and return
0.0. While code with norms of gradients runs, ``p.grad`` is therefore a tensor that refuses every
use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron_lightning.errors import ConfigError


class WithheldGradient(Tensor):
    """A gradient without values, of the parameter's shape. Using it raises a ConfigError."""

    reason: str

    @classmethod
    def of(cls, parameter: Tensor, reason: str) -> WithheldGradient:
        """Return the gradient of ``parameter``. ``reason`` is the error's text."""
        like = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        made: WithheldGradient = Tensor._make_subclass(cls, like.expand(parameter.shape))
        made.reason = reason
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse every function.

        Raises:
            ConfigError: Always.
        """
        leaves = tree_leaves((args, dict(kwargs or {})))
        raise ConfigError(next(leaf.reason for leaf in leaves if isinstance(leaf, cls)))


class WithheldGradients:
    """Withhold the gradients of a module's parameters for a time."""

    def __init__(self) -> None:
        self._withheld: list[nn.Parameter] = []

    def begin(self, parameters: Iterable[nn.Parameter], reason: str) -> None:
        """Withhold the gradients of trainable parameters without a gradient."""
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = WithheldGradient.of(parameter, reason)
                self._withheld.append(parameter)

    def end(self) -> bool:
        """Make the gradients None again. Return whether other code has set a gradient to None."""
        cleared = any(parameter.grad is None for parameter in self._withheld)
        for parameter in self._withheld:
            if isinstance(parameter.grad, WithheldGradient):
                parameter.grad = None
        self._withheld.clear()
        return cleared
