"""Names of classes and functions among the hyper-parameters of a checkpoint.

Lightning calls ``_instantiator``, and the instantiator of LightningCLI has jsonargparse import
``_class_path`` and every ``class_path`` below. A checkpoint of plain values could run any code that
way. Only LightningCLI's instantiator is accepted, and only classes that are imported already.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import Any

from megatron_lightning.config.class_paths import imported_class, is_known
from megatron_lightning.errors import CheckpointError

_INSTANTIATORS = (
    "lightning.pytorch.cli.instantiate_module",
    "pytorch_lightning.cli.instantiate_module",
)
"""The values that LightningCLI writes."""
_HYPER_PARAMETERS = (
    "hyper_parameters",
    "datamodule_hyper_parameters",
    "hparams",
    "module_arguments",
)
"""Entries that Lightning reads as arguments of a module, old names included."""
_PLAIN = (
    str, bytes, int, float, bool, complex, type(None), Path, Any, dict, list, tuple, set, frozenset,
    Mapping, Sequence,
)  # fmt: skip
"""Types of parameters whose texts jsonargparse imports nothing for."""


def check_instantiators(state: Mapping[Any, Any], origin: str) -> None:
    """Check that hyper-parameters name no function but LightningCLI's to make a module.

    Raises:
        CheckpointError: Naming the function.
    """
    for key in _HYPER_PARAMETERS:
        entry = state.get(key)
        found = entry.get("_instantiator") if isinstance(entry, Mapping) else None
        if found is not None and not (isinstance(found, str) and found in _INSTANTIATORS):
            raise CheckpointError(
                f"{origin} names {found!r} as the function that makes the module "
                f"({key}['_instantiator']), and reading the checkpoint would run it. LightningCLI "
                f"writes {_INSTANTIATORS[0]} there. Use another checkpoint, or remove the key from "
                "a checkpoint that you trust."
            )


def check_classes(
    state: Mapping[Any, Any], kind: type, origin: str, *, parsed: bool = False
) -> None:
    """Check the class paths that ``kind.load_from_checkpoint`` would import.

    Args:
        state: The checkpoint.
        kind: The class of the module or data module.
        origin: The checkpoint's name, for messages.
        parsed: Whether the command line parses the hyper-parameters, whoever wrote them.

    Raises:
        CheckpointError: If a class is not imported yet, or the module's class is no subclass of
            ``kind``.
    """
    for key in (getattr(kind, "CHECKPOINT_HYPER_PARAMS_KEY", ""), *_HYPER_PARAMETERS[2:]):
        entry = state.get(key)
        if not isinstance(entry, Mapping) or not (parsed or entry.get("_instantiator")):
            continue
        path = entry.get("_class_path")
        found = imported_class(path)
        if path is not None and not (isinstance(found, type) and issubclass(found, kind)):
            raise CheckpointError(
                f"{origin} was written by {path}, which is no subclass of {kind.__name__} in a "
                "module imported so far, and importing it would run code that the checkpoint "
                f"chooses. If you trust the checkpoint, import the module of {path} before "
                "load_from_checkpoint."
            )
        for place, name in _class_paths(entry, key):
            if not is_known(name):
                raise _refusal(origin, "class", name, place)
            made = imported_class(name)
            if made is not None and not isinstance(made, type):
                raise CheckpointError(
                    f"{origin} names {name} as a class ({place}), which is none, and reading the "
                    "checkpoint would call it. Use another checkpoint, or remove the entry from "
                    "one that you trust."
                )
        if found is not None or not parsed:  # otherwise the command line knows the class
            for place, name in _imported_texts(entry, found or kind, key):
                raise _refusal(origin, "class or function", name, place)


def _refusal(origin: str, what: str, name: str, place: str) -> CheckpointError:
    return CheckpointError(
        f"{origin} names the {what} {name} ({place}), which no module imported so far has, and "
        "importing it would run code that the checkpoint chooses. If you trust the checkpoint, "
        f"import the module of {name} before load_from_checkpoint."
    )


def _imported_texts(values: Mapping[Any, Any], kind: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yield place and value of texts among arguments of a class that jsonargparse would import:
    those of a parameter that takes a function, a class or an object.
    """
    types = _parameter_types(kind)
    for name, value in values.items():
        if not str(name).startswith("_") and not _is_plain(types.get(name, object)):
            yield from _texts(value, f"{place}[{name!r}]")


def _texts(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        path = value.get("class_path")
        for key, entry in value.items():
            inside = f"{place}[{key!r}]"
            if key in ("init_args", "dict_kwargs") and path and isinstance(entry, Mapping):
                yield from _imported_texts(entry, imported_class(path), inside)
            elif key != "class_path":
                yield from _texts(entry, inside)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, entry in enumerate(value):
            yield from _texts(entry, f"{place}[{index}]")
    elif isinstance(value, str) and _would_import(value):
        yield place, value


def _would_import(text: str) -> bool:
    """Return whether a text is the path of an object in a module not imported yet."""
    names = text.split(".")
    if len(names) < 2 or not all(name.isidentifier() for name in names) or is_known(text):
        return False
    # Looking for a package without a dot runs nothing.
    return names[0] in sys.modules or find_spec(names[0]) is not None


def _parameter_types(kind: Any) -> dict[str, Any]:
    """Return the types of a class's parameters, of its bases' too: ``**kwargs`` may reach them."""
    types: dict[str, Any] = {}
    for base in reversed(kind.__mro__ if isinstance(kind, type) else ()):
        init = vars(base).get("__init__")
        code = getattr(init, "__code__", None)
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()
        try:
            hints = typing.get_type_hints(init) if init and code else {}
        except Exception:  # names that exist for type checkers alone
            hints = dict.fromkeys(getattr(init, "__annotations__", {}), object)
        types |= {**dict.fromkeys(names, Any), **hints}
    return types


def _is_plain(annotation: Any) -> bool:
    if typing.get_origin(annotation) is typing.Literal:
        return True
    arguments = [one for one in typing.get_args(annotation) if one is not ...]
    if not arguments:
        return annotation in _PLAIN
    return typing.get_origin(annotation) in (*_PLAIN, typing.Union, UnionType) and all(
        map(_is_plain, arguments)
    )


def _class_paths(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yield place and value of every ``class_path`` in nested values."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if key == "class_path" and isinstance(entry, str):
                yield f"{place}[{key!r}]", entry
            yield from _class_paths(entry, f"{place}[{key!r}]")
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, entry in enumerate(value):
            yield from _class_paths(entry, f"{place}[{index}]")
