"""Lazy package attributes (PEP 562): importing a torch-free name does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module


def lazy_attributes(package: str, modules: Mapping[str, str]) -> None:
    """Import ``modules[name]`` on first use of ``package.name``.

    A ``__getattr__`` in the source of the package would make type checkers accept every name.
    """

    def getattr_(name: str) -> object:
        if name not in modules:
            hint = hint_of_other_library(name)
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        return getattr(import_module(modules[name]), name)

    vars(sys.modules[package]).update(__getattr__=getattr_, __dir__=lambda: sorted(modules))


def hint_of_other_library(name: str) -> str:
    """Return what a class or function of Megatron or NeMo is here, to end an AttributeError. "":
    the name is none of theirs.
    """
    from megatron_lightning.names.lookup import answer_for_attribute

    answer = "" if name.startswith("_") else answer_for_attribute(name)
    return answer and f". {answer}."
