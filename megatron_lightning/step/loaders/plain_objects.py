"""States of loaders as plain values.

A checkpoint holds plain values alone, and states may be objects. Objects are stored as the names of
their classes with their fields, and made again only of imported classes in the packages of the
loader, without a call of constructors or an import. A save refuses a class of another package too.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Set
from typing import Any

import numpy as np
import torch

from megatron_lightning.errors import CheckpointError

_CLASS, _FIELDS, _ITEMS, _ARRAY, _PLAIN = "_class", "_fields", "_items", "_array", "_plain"
_MARKS = frozenset({_CLASS, _ARRAY, _PLAIN})
"""Keys that mark a dict made by :func:`packed`."""


def packages_of(loader: object) -> frozenset[str]:
    """Return the packages of a loader's states: of its class, and of each base class with a
    ``save_state_rank`` of its own.
    """
    kind = type(loader)
    owners = [kind, *(base for base in kind.__mro__ if "save_state_rank" in vars(base))]
    return frozenset(_package(owner.__module__) for owner in owners)


def packed(value: Any, packages: Set[str]) -> Any:
    """Return a state as plain values, with the names of the classes of objects.

    Raises:
        CheckpointError: If a class could not be made again: it is in none of ``packages``, or in
            no module.
    """
    if isinstance(value, np.ndarray):
        return {_ARRAY: torch.from_numpy(value.copy())}
    if isinstance(value, dict):
        return _packed_dict(value, packages)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        fields = {name: packed(getattr(value, name), packages) for name in names}
        return {_CLASS: _checked_name(value, packages), _FIELDS: fields}
    if type(value) in (list, tuple):
        return type(value)(packed(item, packages) for item in value)
    # The loader may go on with the tensor.
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _packed_dict(value: dict[Any, Any], packages: Set[str]) -> dict[Any, Any]:
    items = {key: packed(item, packages) for key, item in value.items()}
    if type(value) is dict:
        return {_PLAIN: items} if _MARKS & items.keys() else items
    name = _checked_name(value, packages)
    return {_CLASS: name, _ITEMS: items, _FIELDS: packed(dict(vars(value)), packages)}


def unpacked(value: Any, packages: Set[str]) -> Any:
    """Return the state of plain values, with objects of classes in ``packages``.

    Raises:
        CheckpointError: If a class is in none of the packages, or missing.
    """
    if isinstance(value, dict) and _ARRAY in value:
        return value[_ARRAY].numpy()
    if isinstance(value, dict) and _PLAIN in value:
        return {key: unpacked(item, packages) for key, item in value[_PLAIN].items()}
    if isinstance(value, dict) and _CLASS in value:
        kind = _class(value[_CLASS], packages)
        # A ``__new__`` of the class would be code that a checkpoint calls.
        instance: Any = (dict if issubclass(kind, dict) else object).__new__(kind)
        if _ITEMS in value:
            dict.update(instance, unpacked(value[_ITEMS], packages))
        for name, field in value[_FIELDS].items():
            object.__setattr__(instance, name, unpacked(field, packages))
        return instance
    if isinstance(value, dict):
        return {key: unpacked(item, packages) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(unpacked(item, packages) for item in value)
    return value


def equal_values(first: Any, second: Any) -> bool:
    """Return whether two states of plain values are equal."""
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        are_tensors = isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
        return are_tensors and torch.equal(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        same = first.keys() == second.keys()
        return same and all(equal_values(value, second[key]) for key, value in first.items())
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        pairs = zip(first, second, strict=False)
        return len(first) == len(second) and all(equal_values(*pair) for pair in pairs)
    return bool(first == second)


def _package(module: str) -> str:
    """Return the package of a module. A spawned process runs the program as ``__mp_main__``."""
    return "__main__" if module == "__mp_main__" else module.partition(".")[0]


def _checked_name(value: object, packages: Set[str]) -> str:
    """Return the name of a value's class.

    Raises:
        CheckpointError: If :func:`unpacked` would refuse the name.
    """
    module = type(value).__module__
    module = _package(module) if module == "__mp_main__" else module
    name = f"{module}:{type(value).__qualname__}"
    _class(name, packages)
    return name


def _class(name: str, packages: Set[str]) -> Any:
    module, _, path = name.partition(":")
    _check_package(name, module, packages)
    # An import would run a module that the checkpoint names.
    value: Any = sys.modules.get(module)
    if value is None:
        raise CheckpointError(
            f"the loader's state is a {name}, and the program has not imported {module}. Import it "
            "before the fit, if the package has the module."
        )
    try:
        for part in path.split("."):
            value = getattr(value, part)
    except AttributeError as error:
        raise CheckpointError(
            f"the loader's state is a {name}, and {module} has no such class. Install the version "
            "that saved it, or move a class inside of a function to its module."
        ) from error
    is_class = isinstance(value, type)
    if not is_class or not (dataclasses.is_dataclass(value) or issubclass(value, dict)):
        raise CheckpointError(f"the checkpoint's loader state is a {name}, which holds no state.")
    # A module of the package holds what it imports as well.
    _check_package(name, value.__module__, packages)
    return value


def _check_package(name: str, module: str, packages: Set[str]) -> None:
    if _package(module) not in packages:
        raise CheckpointError(
            f"the loader's state is a {name} of the package {_package(module)}, and the loader is "
            f"of the package {', '.join(sorted(packages))}: only classes there are made again. "
            "Resume with the loader that saved the checkpoint, or save plain values."
        )
