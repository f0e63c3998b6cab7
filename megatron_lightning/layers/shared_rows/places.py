"""Tensors of a call, by place, and the dims that run over the tokens of a row.

Sizes alone are ambiguous: a row may be as long as a layer is wide. The places are therefore learned
in a call with a row whose length is no other size of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_with_path

Change = Callable[[str, Tensor], Tensor]
"""Place and tensor -> the tensor in its stead."""


@dataclass
class Places:
    """Tensors of calls with a dim of tokens."""

    dims: dict[str, int] = field(default_factory=dict)
    """Place -> the dim that runs over a row's tokens."""
    masks: set[str] = field(default_factory=set)
    """Places of masks [b, n, queries, keys]."""

    @classmethod
    def of(cls, values: Any, length: int) -> Places:
        """Return the places in ``values``, of a call with rows of ``length`` tokens."""
        found = cls()
        for place, tensor in tensors(values):
            dims = [dim for dim, size in enumerate(tensor.shape) if size == length]
            if is_mask(tensor, length):
                found.masks.add(place)
            elif len(dims) == 1:
                found.dims[place] = dims[0]
        return found

    def without(self, places: set[str]) -> Places:
        """Return all other places."""
        return Places({p: d for p, d in self.dims.items() if p not in places}, self.masks - places)


def tensors(values: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield place and tensor of ``values``: nested tuples, lists and dicts."""
    for path, leaf in tree_flatten_with_path(values)[0]:
        if isinstance(leaf, Tensor):
            yield keystr(path), leaf


def changed(values: Any, change: Change) -> Any:
    """Return ``values`` with every tensor replaced."""

    def one(path: Any, leaf: Any) -> Any:
        return change(keystr(path), leaf) if isinstance(leaf, Tensor) else leaf

    return tree_map_with_path(one, values)


def is_mask(tensor: Tensor, length: int) -> bool:
    """Return whether a tensor says which of ``length`` keys every query sees."""
    return tensor.ndim == 4 and tensor.shape[-1] == tensor.shape[-2] == length


def hidden_states(values: Any, places: Mapping[str, int]) -> tuple[str, Tensor] | None:
    """Return place and tensor of the hidden states among the arguments of a call: the first one of
    numbers with features behind the tokens.
    """
    for place, tensor in tensors(values):
        dim = places.get(place, 0)
        if tensor.is_floating_point() and tensor.ndim >= 3 and 0 < dim < min(tensor.ndim - 1, 3):
            return place, tensor
    return None
