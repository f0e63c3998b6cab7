"""Packages with attributes imported on first use."""

from __future__ import annotations

import importlib
import inspect
import pickle
from typing import Any

import pytest

from megatron_lightning import _lazy

PACKAGES = (
    "", "bridge", "callbacks", "checkpoint", "data", "models", "modules", "optim", "parallel",
    "peft", "precision", "resilience",
)  # fmt: skip


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_is_imported_on_first_use(name: str) -> None:
    path = f"megatron_lightning.{name}".rstrip(".")
    package = importlib.import_module(path)
    assert inspect.getmodule(package.__getattr__) is _lazy
    assert set(package.__all__) <= set(dir(package))
    names: dict[str, Any] = {}
    exec(f"from {path} import *", names)
    for public in package.__all__:
        assert names[public] is getattr(package, public)
        if isinstance(names[public], type):
            assert pickle.loads(pickle.dumps(names[public])) is names[public]
    with pytest.raises(AttributeError, match=r"has no attribute 'Missing'"):
        _ = package.Missing
    # Type checkers accept every name of a package with a __getattr__ in the source.
    assert "__getattr__" not in inspect.getsource(package)
