"""Whether a function is a user's, or belongs to a library known to this package."""

from __future__ import annotations

from functools import partial

_LIBRARIES = frozenset(
    {"lightning", "pytorch_lightning", "megatron_lightning", "torch", "builtins"}
    | {"accelerate", "peft", "transformers"}  # their hooks go with their models
)


def is_library(function: object) -> bool:
    """Return whether a function, or the class of a callable object, is of a known library."""
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__module__", None) or type(function).__module__
    return is_library_module(str(owner))


def is_library_module(name: str) -> bool:
    """Return whether a Python module, by its full name, is of a known library."""
    return name.partition(".")[0] in _LIBRARIES
