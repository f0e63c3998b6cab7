"""Removable wrappers around methods and other attributes of a module.

Wrappers are attributes of the instance, and the methods of the class stay. Names, parameters and
hooks do not change, and the module can be copied and pickled. A wrapper is called with the method,
or with an earlier wrapper's result, before the method's arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

_ORIGINALS = "_megatron_originals"
_WRAPPED = "_megatron_wrapped"

Forward = Callable[..., Any]


def wrap(module: nn.Module, name: str, wrapper: Callable[..., Any]) -> None:
    """Wrap a method of ``module``. Earlier wrappers run inside the new wrapper."""
    if name != "forward":
        replace_attribute(module, name, partial(wrapper, getattr(module, name)))
        return
    attributes = module.__dict__
    method = module.forward if name in attributes else MethodType(_own_forward, module)
    attributes[_WRAPPED] = partial(wrapper, attributes.get(_WRAPPED, method))
    # torch.compile recognizes the forward of an instance by the function of a bound method. All
    # modules share the function here. Any other callable is recognized by identity, and would need
    # a graph for each module.
    replace_attribute(module, name, MethodType(forward, module))


def replace_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute of the instance until :func:`restore`."""
    attributes = module.__dict__
    attributes.setdefault(_ORIGINALS, {}).setdefault(name, attributes.get(name))
    attributes[name] = value


def restore(module: nn.Module) -> None:
    """Undo all calls of :func:`wrap` and :func:`replace_attribute` for ``module``."""
    attributes = module.__dict__
    attributes.pop(_WRAPPED, None)
    for name, value in attributes.pop(_ORIGINALS, {}).items():
        if value is None:
            attributes.pop(name, None)
        else:
            attributes[name] = value


def wrapped_forward(module: nn.Module) -> partial[Any] | None:
    """Return the outermost wrapper of the module's forward with the wrapper's arguments, or
    None.
    """
    wrapped: partial[Any] | None = module.__dict__.get(_WRAPPED)
    return wrapped


def replace_wrapped_forward(module: nn.Module, wrapped: partial[Any]) -> None:
    """Replace the result of :func:`wrapped_forward`. The result must not be None."""
    module.__dict__[_WRAPPED] = wrapped


def _own_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a module's current class.

    Plain linear layers change class when quantized or deferring gradients.
    """
    return type(self).forward(self, *args, **kwargs)


_own_forward.__name__ = "forward"  # pickles look up by this name, and find the class's forward


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the wrapped forward of a module.

    Pickles look the function up by name, and find the module's forward.
    """
    return self.__dict__[_WRAPPED](*args, **kwargs)
