"""Code in a model of ``transformers`` that neither it nor a known library has written.

What is known of a family is known of its code. A subclass with a forward of its own, a method set
on an instance, or a replaced layer may compute anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

_KNOWN = (
    "torch.", "transformers.", "megatron_lightning.", "peft.", "liger_kernel.", "bitsandbytes.",
    "torchao.", "accelerate.", "flash_attn.", "causal_conv1d.", "mamba_ssm.", "fla.", "kernels.",
)  # fmt: skip
"""Beginnings of the names of files whose layers mix no tokens beside those of their family."""
_HARMLESS = frozenset({"__init__", "_init_weights", "init_weights", "sharding_plan"})


def foreign_code(model: nn.Module) -> str | None:
    """Return the path of the first module with code of unknown files, and the code's name."""
    for path, module in model.named_modules():
        for name, function in _functions(module):
            if not f"{_file_of(function)}.".startswith(_KNOWN):
                return f"{path}.{name}" if path else name
    return None


def _file_of(function: Any) -> str:
    """Return the name of the file with a function's code, whatever the function is called."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    names = getattr(function, "__globals__", {})  # a wrapper copies __module__ of what it wraps
    return str(names.get("__name__") or getattr(function, "__module__", ""))


def _functions(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and function of a module's forward, of functions set on the module, and of what
    overrides a method of ``transformers``.
    """
    for name, value in vars(module).items():
        if isinstance(value, FunctionType | MethodType | partial):
            yield name, value
    yield "forward", type(module).forward
    bases = type(module).__mro__
    known = [base for base in bases if base.__module__.startswith("transformers.")]
    theirs = {name for base in known for name in vars(base)}
    for base in bases:
        if not f"{base.__module__}.".startswith(_KNOWN):
            for name, value in vars(base).items():
                if name in theirs and name not in _HARMLESS and isinstance(value, FunctionType):
                    yield name, value
