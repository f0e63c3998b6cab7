"""Names mentioned by a user's function, in its own code and in called functions of the user: to
find norms and reads of gradients.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from torch import Tensor

from megatron_lightning.parallel.origin import is_library

CLIPS = frozenset(
    {"clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grads_with_norm_"}
)
"""Functions of torch that change gradients by the view of one rank."""
READ_BY_STRATEGY = frozenset(
    {"gradient_norm", "gradients", "gradient_group_norms", "clip_gradients", "last_grad_norm"}
)
"""Methods of the strategy and the module with the gradients of all ranks."""


def mentioned(function: Callable[..., Any], owner: object = None) -> frozenset[str]:
    """Return the names mentioned by ``function``, and ``set:NAME`` for every attribute set by
    ``function``.

    Args:
        function: A function or bound method of the user's.
        owner: The object with other methods that ``function`` may call.
    """
    names: set[str] = set()
    _visit(function, owner, names, set())
    return frozenset(names)


def takes_norms(names: frozenset[str]) -> bool:
    """Whether one of ``names`` is a function of torch or Lightning for norms of gradients, without
    changes to gradients.
    """
    grad_norm = "grad_norm" in names and any("utilities" in name for name in names)
    return grad_norm or "lightning:grad_norm" in names or "get_total_norm" in names


def edits_gradients(names: frozenset[str]) -> bool:
    """Whether code mentioning ``names`` reads ``grad`` and calls functions that change tensors in
    place, or sets ``grad``.
    """
    in_place = any(
        name.endswith("_") and not name.endswith("__") and hasattr(Tensor, name) for name in names
    )
    return "set:grad" in names or ("grad" in names and in_place)


def _visit(function: Any, owner: object, names: set[str], seen: set[CodeType]) -> None:
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    if code is None or code in seen:
        return
    seen.add(code)
    for name in set(_names(code)):
        names.add(name)
        called = function.__globals__.get(name) or getattr(type(owner), name, None)
        if not inspect.isroutine(called):
            continue
        true_name = str(getattr(called, "__name__", name))  # imported under another name
        names.add(true_name)
        if is_library(called):
            names.add(f"lightning:{true_name}")
        else:
            _visit(called, owner, names, seen)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR":
            yield f"set:{instruction.argval}"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
