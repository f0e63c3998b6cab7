"""Code in a model of ``transformers`` that neither it nor a known library has written.

What is known of a family is known of its code. A subclass with a forward of its own, a method set
on an instance, a hook, an attention function or a replaced layer may compute anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from megatron_lightning.layers.attention.known_functions import (
    attention_functions,
    is_known,
    is_known_file,
)

_HARMLESS = frozenset({
    "__init__", "_init_weights", "init_weights", "sharding_plan", "_loss_function",
})  # fmt: skip
"""Methods and attributes that no forward of hidden states calls."""


def foreign_code(model: nn.Module, beside: Collection[str] = ()) -> str | None:
    """Return the path of the first module with code of unknown files, and the code's name.

    Args:
        model: The model.
        beside: Paths of modules whose code may be any.
    """
    for path, module in model.named_modules():
        if any(f"{path}.".startswith(f"{one}.") for one in beside):
            continue
        for name, function in _functions(module):
            if not is_known(function):
                return f"{path}.{name}" if path else name
    return None


def _functions(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and function of a module's forward, of its hooks and attention functions, of
    functions set on the module, and of what overrides a method of ``transformers``.
    """
    for name, value in vars(module).items():
        if name not in _HARMLESS and isinstance(value, FunctionType | MethodType | partial):
            yield name, value
    yield "forward", type(module).forward
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        yield f"hook {getattr(hook, '__name__', type(hook).__name__)}", hook
    yield from attention_functions(getattr(module, "config", None))
    bases = type(module).__mro__
    known = [base for base in bases if base.__module__.startswith("transformers.")]
    theirs = {name for base in known for name in vars(base)}
    for base in bases:
        if not is_known_file(base.__module__):
            for name, value in vars(base).items():
                if name in theirs and name not in _HARMLESS and isinstance(value, FunctionType):
                    yield name, value
