"""Tensors in the place of ``p.grad`` while code of the user's runs, to see the use of a gradient.

torch passes every function of a tensor subclass to ``__torch_function__``, so that only code that
runs counts. Our own code reads the gradients behind by :func:`gradient_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

Use: TypeAlias = "Callable[[StandIn, Callable[..., Any]], None]"
"""Called with a stand-in and a function of torch, before the function."""

_ASKED = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn")
) | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__hash__}
_SAME = frozenset(  # the same values, for the next function
    {
        getattr(Tensor, "data").__get__,  # noqa: B009 (the descriptor)
        *(Tensor.detach, Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.ravel),
        *(Tensor.to, Tensor.float, Tensor.double, Tensor.cpu, torch.flatten),
    }
)


class StandIn(Tensor):
    """A tensor in the place of a gradient."""

    gradient: Tensor | None
    """The gradient. None: the parameter has none, and the values of the stand-in are zeros."""
    use: Use

    @classmethod
    def showing(cls, gradient: Tensor, use: Use) -> StandIn:
        """Return a stand-in with the memory and the version of ``gradient``."""
        stand_in: StandIn = Tensor._make_subclass(cls, gradient)
        stand_in.gradient = gradient
        stand_in.use = use
        return stand_in

    @classmethod
    def of(cls, parameter: Tensor, use: Use) -> StandIn:
        """Return a stand-in of the shape of ``parameter``, without memory."""
        zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        stand_in: StandIn = Tensor._make_subclass(cls, zero.expand(parameter.shape))
        stand_in.gradient = None
        stand_in.use = use
        return stand_in

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Report the use, and compute with the gradient."""
        kwargs = dict(kwargs or {})
        if func in _ASKED:
            return super().__torch_function__(func, tuple(types), args, kwargs)  # type: ignore[no-untyped-call]
        stand_in = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        stand_in.use(stand_in, func)
        plain_args, plain_kwargs = tree_map(_plain, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        if result is _plain(stand_in):  # in place
            return stand_in
        return cls.showing(result, stand_in.use) if func in _SAME else result


def _plain(value: Any) -> Any:
    if not isinstance(value, StandIn):
        return value
    return value.as_subclass(Tensor) if value.gradient is None else value.gradient


def gradient_of(tensor: Tensor) -> Tensor | None:
    """Return ``tensor.grad``, or the gradient behind a stand-in."""
    gradient = tensor.grad
    return gradient.gradient if isinstance(gradient, StandIn) else gradient


class StandIns:
    """Stand-ins in the place of gradients, for a time.

    Args:
        use: Called with every stand-in used and the function.
    """

    def __init__(self, use: Use) -> None:
        self._use = use
        self._absent: dict[tuple[torch.Size, torch.dtype, torch.device], StandIn] = {}
        self._placed: list[tuple[nn.Parameter, StandIn]] = []
        self._handles: list[RemovableHandle] = []

    def __bool__(self) -> bool:
        return bool(self._placed)

    def show(self, parameters: Iterable[nn.Parameter]) -> None:
        """Show the existing gradients of the parameters through stand-ins."""
        for parameter in parameters:
            if type(parameter.grad) is Tensor:
                self._place(parameter, StandIn.showing(parameter.grad, self._use))

    def replace_missing(self, parameters: Iterable[nn.Parameter]) -> None:
        """Place stand-ins on trainable parameters without a gradient."""
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                key = (parameter.shape, parameter.dtype, parameter.device)
                if key not in self._absent:
                    self._absent[key] = StandIn.of(parameter, self._use)
                self._place(parameter, self._absent[key])
                make_way = partial(_make_way, parameter)
                self._handles.append(parameter.register_hook(make_way))  # type: ignore[no-untyped-call]

    def _place(self, parameter: nn.Parameter, stand_in: StandIn) -> None:
        parameter.grad = stand_in
        self._placed.append((parameter, stand_in))

    def remove(self) -> list[tuple[nn.Parameter, StandIn]]:
        """Restore the gradients. Return the parameters whose stand-in other code has cleared."""
        cleared = []
        for parameter, stand_in in self._placed:
            if parameter.grad is stand_in:
                parameter.grad = stand_in.gradient
            elif parameter.grad is None:
                cleared.append((parameter, stand_in))
        self._placed.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return cleared


def _make_way(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Clear a stand-in before autograd adds a gradient to it: it has no memory."""
    if isinstance(parameter.grad, StandIn):
        parameter.grad = None
