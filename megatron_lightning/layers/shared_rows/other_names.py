"""A forward that finds other things under some of its global names.

Code of ``transformers`` looks functions up in the globals of its file: attention by name, scans and
convolutions as functions. Here a module's forward runs with a copy of these globals, in which some
names mean the functions of ranks that share rows. Nothing of ``transformers`` is patched, and other
modules of the same class stay as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import unwrap
from types import FunctionType
from typing import Any

from torch import nn

from megatron_lightning.layers.change_class import change_class


class _OtherNames(nn.Module):
    """A module with other global names. Its own class is the next base."""

    other_names: Mapping[str, Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own: Any = super()
        function: Any = unwrap(own.forward.__func__)
        names = function.__globals__ | self.other_names
        closure, defaults = function.__closure__, function.__defaults__
        renamed = FunctionType(function.__code__, names, function.__name__, defaults, closure)
        renamed.__kwdefaults__ = function.__kwdefaults__
        return renamed(self, *args, **kwargs)


def forward_of(module: nn.Module) -> Any:
    """Return the function of a module's own forward, also where the module has other names."""
    own = (base for base in type(module).__mro__ if base is not _OtherNames)
    return unwrap(next(vars(base)["forward"] for base in own if "forward" in vars(base)))


def names_of(module: nn.Module) -> frozenset[str]:
    """Return the global names in the code of a module's own forward."""
    forward = forward_of(module)
    return (
        frozenset(forward.__code__.co_names) if isinstance(forward, FunctionType) else frozenset()
    )


def globals_of(module: nn.Module) -> Mapping[str, Any]:
    """Return what a module's own forward finds under global names."""
    forward = forward_of(module)
    return forward.__globals__ if isinstance(forward, FunctionType) else {}


def bind_names(module: nn.Module, other_names: Mapping[str, Any]) -> None:
    """Give other names to a module and to all modules in it whose code has one of the names, in
    place of those that they were given before.
    """
    for child in list(module.modules()):
        if isinstance(child, _OtherNames):
            child.other_names = other_names
        elif names_of(child) & other_names.keys():
            change_class(child, _OtherNames, other_names=other_names)


@contextmanager
def bound_names(module: nn.Module, other_names: Mapping[str, Any]) -> Iterator[None]:
    """Bind names, until the end of the context."""
    with ExitStack() as undo:
        for child in module.modules():
            if isinstance(child, _OtherNames):
                undo.callback(setattr, child, "other_names", child.other_names)
            elif names_of(child) & other_names.keys():
                undo.callback(_unbind, child, type(child))
        bind_names(module, other_names)
        yield


@contextmanager
def without_other_names(model: nn.Module) -> Iterator[None]:
    """Context in which all modules in ``model`` find what they find alone."""
    with ExitStack() as undo:
        for child in model.modules():
            if isinstance(child, _OtherNames):
                undo.callback(setattr, child, "other_names", child.other_names)
                child.other_names = {}
        yield


def _unbind(module: nn.Module, own: type[nn.Module]) -> None:
    module.__class__ = own
    del module.other_names
