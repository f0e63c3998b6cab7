"""Models made without values, to be filled from folders later. A run without folders imports this
file alone of the package.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode, handle_torch_function

PENDING = "_pending_weights"
"""Attribute of a model with the values still in a folder."""


class _Deferring(TorchFunctionMode):
    """Answer :func:`is_deferred`. Every other function runs as always."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return True if func is is_deferred else func(*args, **(kwargs or {}))


@contextmanager
def deferred_weights() -> Iterator[None]:
    """Make models in the block without values. ``untouched.read_weights`` reads the values
    later.
    """
    with _Deferring():
        yield


def is_deferred() -> bool:
    """Return whether models made now get their values later."""
    try:
        return bool(handle_torch_function(is_deferred, ()))
    except TypeError:  # torch's answer without an active mode
        return False


def has_pending(module: nn.Module) -> bool:
    """Return whether any model in the module has values still in a folder."""
    return any(PENDING in vars(child) for child in module.modules())
