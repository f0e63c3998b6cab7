"""Computation of a layer by a module of another library.

The layer keeps its parameters, names and checkpoints; an engine, set on ``layer.engine``, computes
its forward and backward with them. Copies of a layer have none, and compute by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor


class Engine(Protocol):
    """Computes one layer."""

    checkpoint: Callable[..., Any] | None
    """Computes a function again in backward that runs the layer, with the arguments of torch's
    ``checkpoint``; None: torch's does."""

    def takes(self, x: Tensor, *args: Any) -> bool:
        """Return whether it computes these inputs; if not, the layer does."""
        ...

    def __call__(self, x: Tensor, *args: Any) -> Tensor:
        """Map the layer's inputs to its output."""
        ...
