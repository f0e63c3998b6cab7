"""Code in a model of ``transformers`` that neither it nor a known library has written.

What is known of a family is known of its code. A subclass with a forward of its own, a method set
on an instance, or a replaced layer may compute anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import nn

_KNOWN = (
    "torch.", "transformers.", "megatron_lightning.", "peft.", "liger_kernel.", "bitsandbytes.",
    "torchao.", "accelerate.",
)  # fmt: skip
"""Beginnings of the names of files whose layers mix no tokens beside those of their family."""
_HARMLESS = frozenset({"__init__", "_init_weights", "init_weights", "sharding_plan"})


def foreign_code(model: nn.Module) -> str | None:
    """Return the path of the first module with code of unknown files, and the code's name."""
    for path, module in model.named_modules():
        for name, function in _functions(module):
            if not f"{getattr(function, '__module__', '')}.".startswith(_KNOWN):
                return f"{path}.{name}" if path else name
    return None


def _functions(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and function of a module's forward, and of what overrides a method of
    ``transformers``.
    """
    own = vars(module).get("forward")
    if own is not None:
        yield "forward", getattr(own, "__func__", own)
    yield "forward", type(module).forward
    bases = type(module).__mro__
    known = [base for base in bases if base.__module__.startswith("transformers.")]
    theirs = {name for base in known for name in vars(base)}
    for base in bases:
        if not f"{base.__module__}.".startswith(_KNOWN):
            for name, value in vars(base).items():
                if name in theirs and name not in _HARMLESS and isinstance(value, FunctionType):
                    yield name, value
