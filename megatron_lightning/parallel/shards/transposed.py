"""Linear layers with a weight stored as [in, out]."""

from __future__ import annotations

from torch import nn


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer is a ``Conv1D`` of ``transformers``, with a weight [in, out]."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")
