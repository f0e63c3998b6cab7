"""States of loaders as plain values.

A checkpoint holds plain values alone, and states may be objects. Objects are stored as the names of
their classes with their fields, and made again only of classes in the loader's own package, without
a call of their code.
"""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import Any

import numpy as np
import torch

from megatron_lightning.errors import CheckpointError

_CLASS, _FIELDS, _ITEMS, _ARRAY = "_class", "_fields", "_items", "_array"


def packed(value: Any) -> Any:
    """Return a state as plain values, with the names of the classes of objects."""
    if isinstance(value, np.ndarray):
        return {_ARRAY: torch.from_numpy(value.copy())}
    if isinstance(value, dict):
        items = {key: packed(item) for key, item in value.items()}
        if type(value) is dict:
            return items
        return {_CLASS: _name(value), _ITEMS: items, _FIELDS: packed(dict(vars(value)))}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {_CLASS: _name(value), _FIELDS: {n: packed(getattr(value, n)) for n in names}}
    if type(value) in (list, tuple):
        return type(value)(packed(item) for item in value)
    return value


def unpacked(value: Any, package: str) -> Any:
    """Return the state of plain values, with objects of classes in ``package``.

    Raises:
        CheckpointError: If a class is in another package, or missing.
    """
    if isinstance(value, dict) and _ARRAY in value:
        return value[_ARRAY].numpy()
    if isinstance(value, dict) and _CLASS in value:
        kind = _class(value[_CLASS], package)
        made: Any = kind.__new__(kind)
        if _ITEMS in value:
            dict.update(made, unpacked(value[_ITEMS], package))
        for name, field in value[_FIELDS].items():
            object.__setattr__(made, name, unpacked(field, package))
        return made
    if isinstance(value, dict):
        return {key: unpacked(item, package) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(unpacked(item, package) for item in value)
    return value


def equal_values(first: Any, second: Any) -> bool:
    """Return whether two states of plain values are equal."""
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        both = isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
        return both and torch.equal(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        same = first.keys() == second.keys()
        return same and all(equal_values(value, second[key]) for key, value in first.items())
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        pairs = zip(first, second, strict=False)
        return len(first) == len(second) and all(equal_values(*pair) for pair in pairs)
    return bool(first == second)


def _name(value: object) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _class(name: str, package: str) -> Any:
    module, _, path = name.partition(":")
    if module.partition(".")[0] != package:
        raise CheckpointError(
            f"the checkpoint's loader state is a {name}, and the loader is of the package "
            f"{package}. Resume with the loader that saved it."
        )
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint's loader state is a {name}, which this version of {package} does not "
            "have. Install the version that saved it."
        ) from error
    is_class = isinstance(found, type)
    if not is_class or not (dataclasses.is_dataclass(found) or issubclass(found, dict)):
        raise CheckpointError(f"the checkpoint's loader state is a {name}, which holds no state.")
    return found
