"""Tensors inside lists, tuples and dicts of an optimizer's state.

    state["GG"] = [left, None, right]      tensors  GG#0, GG#1
                                           frame    [{"tensor": 0}, None, {"tensor": 1}]

A checkpoint stores the tensors under names of their own, and the frame beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

_TENSOR = "megatron_lightning: tensor"


def has_tensors(value: object) -> bool:
    """Return whether a state is a list, tuple or dict with tensors inside."""
    return not isinstance(value, Tensor) and any(isinstance(v, Tensor) for v in tree_leaves(value))


def name_of(key: str, number: int) -> str:
    """Return the key of a tensor inside the state ``key``."""
    return f"{key}#{number}"


def flattened(key: str, value: Any) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors of a state by key, and its frame."""
    leaves, structure = tree_flatten(value)
    tensors: dict[str, Tensor] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[index] = {_TENSOR: len(tensors)}
            tensors[name_of(key, len(tensors))] = leaf
    return tensors, tree_unflatten(leaves, structure)


def filled(key: str, frame: Any, take: Callable[[str], Tensor]) -> Any:
    """Undo :func:`flattened`.

    Args:
        key: The state.
        frame: The frame, or a state without tensors of its own names.
        take: Function from the key of a tensor to the tensor.
    """

    def put(leaf: Any) -> Any:
        return take(name_of(key, leaf[_TENSOR])) if _is_place(leaf) else leaf

    return tree_map(put, frame, is_leaf=_is_place)


def _is_place(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == {_TENSOR}
