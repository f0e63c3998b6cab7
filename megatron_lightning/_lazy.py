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
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    vars(sys.modules[package]).update(__getattr__=getattr_, __dir__=lambda: sorted(modules))
