"""Named tuples and dataclasses in nested outputs, opened to dicts for torch's pytree and for
sending as plain data.

A type travels by name: every rank has the type, since all ranks run the same code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

_TYPE = "<type>"
"""Key of the name of the type in an opened dict."""


def opened(tree: Any) -> Any:
    """Return a nested value with dicts in the place of named tuples and dataclasses."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        names: tuple[str, ...] = tree._fields
        return _opened(tree, dict(zip(names, tree, strict=True)))
    if is_dataclass(tree) and not isinstance(tree, type):
        if type(tree) in pytree.SUPPORTED_NODES:  # outputs of transformers
            return tree
        own = [field.name for field in fields(tree) if hasattr(tree, field.name)]
        return _opened(tree, {name: getattr(tree, name) for name in own})
    if type(tree) in (list, tuple):
        return type(tree)(map(opened, tree))
    return {key: opened(item) for key, item in tree.items()} if type(tree) is dict else tree


def _opened(value: Any, items: dict[str, Any]) -> dict[str, Any]:
    kind = type(value)
    if _found(name := f"{kind.__module__}:{kind.__qualname__}") is not kind:
        return value  # type: ignore[no-any-return] # named where it is sent
    return {_TYPE: name, **{key: opened(item) for key, item in items.items()}}


def closed(tree: Any) -> Any:
    """Return an opened nested value in the original form, without calling the types'
    ``__init__``.
    """
    if type(tree) in (list, tuple):
        return type(tree)(map(closed, tree))
    if type(tree) is not dict:
        return tree
    items = {key: closed(item) for key, item in tree.items()}
    kind = _found(items.pop(_TYPE)) if _TYPE in items else None
    if kind is None:
        return items
    if issubclass(kind, tuple):
        return tuple.__new__(kind, items.values())
    instance = object.__new__(kind)
    for name, item in items.items():
        object.__setattr__(instance, name, item)
    return instance


def _found(name: str) -> type | None:
    """Return the named tuple or dataclass of this name. None: no such type on module level."""
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, part, None)
    is_open = isinstance(value, type) and (is_dataclass(value) or hasattr(value, "_fields"))
    return value if is_open else None


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return a nested value with ``function`` applied to the tensors."""
    return closed(pytree.tree_map_only(Tensor, function, opened(tree)))


def tensors_inside(tree: Any) -> list[Tensor]:
    """Return the tensors of a nested value."""
    return [leaf for leaf in pytree.tree_leaves(opened(tree)) if isinstance(leaf, Tensor)]
