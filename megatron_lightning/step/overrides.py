"""Methods replaced on the module during a run, and hooks of the user's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer


def override(module: Any, name: str, replacement: Callable[..., Any], undo: ExitStack) -> None:
    """Replace ``module.name(...)``, also an optimizer's, until ``undo`` is closed, by
    ``replacement(original, ...)``.

    Copies and pickles of ``module`` have the original method.
    """
    attributes = vars(module)
    earlier_value = attributes.get(name)

    def restore() -> None:
        attributes.pop(name, None)
        if earlier_value is not None:
            attributes[name] = earlier_value

    attributes[name] = _Replaced(module, name, replacement)
    undo.callback(restore)


class _Replaced:
    """A method of one object, replaced by a function.

    Args:
        owner: The object. Its attribute ``name`` is the original method.
        name: Name of the method.
        replacement: Called with the original method and the arguments of a call.
    """

    def __init__(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        functools.update_wrapper(self, original)  # first, since it copies attributes
        self._owner = owner
        self._name = name
        self._original = original
        self._before = vars(owner).get(name)
        self._replacement = replacement
        # Lightning reads the code of the wrapped function, of a single level.
        self.__wrapped__ = inspect.unwrap(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._replacement(self._original, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A closure can neither be pickled nor follow a copied owner. A copy of the owner has no
        # attributes yet, so that getattr finds the method of the copy's class.
        if self._before is None:
            return getattr, (self._owner, self._name)
        return _same, (self._before,)


def _same(method: Any) -> Any:
    return method


def unwrapped(optimizer: Any) -> Any:
    """Return the user's optimizer inside of Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def users_hooks(module: pl.LightningModule, name: str) -> list[str]:
    """Return ``Class.name`` of every hook of this name on the module or a callback, except for
    Lightning's hooks and ours.
    """
    return [f"{type(owner).__name__}.{name}" for owner, _ in users_methods(module, name)]


def users_methods(module: pl.LightningModule, name: str) -> list[tuple[Any, Callable[..., Any]]]:
    """Return the owner of every such hook, the module or a callback, and the hook."""
    trainer: Any = module.trainer
    methods = [(owner, getattr(owner, name, None)) for owner in (module, *trainer.callbacks)]
    libraries = ("lightning", "megatron_lightning")
    return [
        (owner, hook)
        for owner, hook in methods
        if hook is not None
        and str(getattr(hook, "__module__", None)).partition(".")[0] not in libraries
    ]
