"""Values that are computed of a weight once, and kept until the weight changes."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class KeptWeight(NamedTuple):
    """Values of a weight."""

    source: Tensor
    """Keeps the memory alive, so that no other tensor can reuse the address."""
    version: int
    values: dict[Any, Any]
    """Filled by the owner."""

    @classmethod
    def of(cls, weight: Tensor) -> KeptWeight:
        """Return a place for values of the weight as it is now."""
        return cls(weight.detach(), weight._version, {})

    def is_of(self, weight: Tensor) -> bool:
        """Return whether a tensor has the same memory and version."""
        source = self.source
        is_equal = weight.data_ptr() == source.data_ptr() and weight.shape == source.shape
        return is_equal and weight._version == self.version
