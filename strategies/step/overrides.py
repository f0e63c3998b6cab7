"""Methods replaced on the module during a run, and hooks of the user's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl


def override(module: Any, name: str, replacement: Callable[..., Any], undo: ExitStack) -> None:
    """Replace ``module.name(...)``, also an optimizer's, until ``undo`` is closed, by
    ``replacement(original, ...)``.
    """
    original, attributes = getattr(module, name), vars(module)
    earlier_value = attributes.get(name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    def restore() -> None:
        attributes.pop(name, None)
        if earlier_value is not None:
            attributes[name] = earlier_value

    attributes[name] = method
    undo.callback(restore)


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
