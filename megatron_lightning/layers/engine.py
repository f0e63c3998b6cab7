"""Compute a layer by a module of another library.

The layer keeps its parameters, names and checkpoints. An engine, set on ``layer.engine``, computes
forward and backward with the layer's parameters. Copies of a layer have no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor


class Engine(Protocol):
    """Computes a layer."""

    checkpoint: Callable[..., Any] | None
    """Checkpoint function for recomputed code around the layer, with the arguments of torch's
    ``checkpoint``. None: torch's function.
    """

    def takes(self, x: Tensor, *args: Any) -> bool:
        """Return whether the engine computes these inputs. If not, the layer computes."""
        ...

    def __call__(self, x: Tensor, *args: Any) -> Tensor:
        """Map the layer's inputs to the layer's output."""
        ...
