"""Methods of the user's module that are exchanged on the object for the time of a run, and given back afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl


class MethodOverrides:
    """Exchanges methods of a LightningModule; what the user had put on the object itself comes back.

    Args:
        module: Whose methods they are.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._before: dict[str, Any] = {}

    def put(self, name: str, replacement: Callable[..., Any]) -> None:
        """Let ``module.name(...)`` call ``replacement(original, ...)``."""
        original = getattr(self._module, name)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        self._before[name] = self._module.__dict__.get(name)
        self._module.__dict__[name] = method

    def give_back(self) -> None:
        """Undo everything."""
        for name, before in self._before.items():
            self._module.__dict__.pop(name, None)
            if before is not None:
                self._module.__dict__[name] = before
        self._before.clear()
