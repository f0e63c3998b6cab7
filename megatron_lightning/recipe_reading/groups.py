"""Groups of options in a configuration file, read by jsonargparse as for ``fit``. No torch here."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from jsonargparse import ArgumentParser

from megatron_lightning.mistakes import Errors

T = TypeVar("T")


def read_section(given: Any, name: str, errors: Errors) -> Mapping[str, Any]:
    """Return the values of a section, or nothing for a value without options."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        errors.add(
            f"{name} is {given!r}, which holds no options. Write each as a line name: value."
        )
        return {}
    return given


def read_object(given: Any, name: str, errors: Errors) -> tuple[str, Mapping[str, Any]]:
    """Return class path ("" if there is none) and arguments of a section."""
    if isinstance(given, str):
        return given, {}
    section = read_section(given, name, errors)
    path, arguments = section.get("class_path", ""), section.get("init_args")
    if not isinstance(path, str):
        errors.add(f"{name}.class_path is {path!r}, which names no class.")
        path = ""
    if arguments is None and path:
        arguments = {}
    values = section if arguments is None else read_section(arguments, f"{name}.init_args", errors)
    return path, values


def read_group(kind: type[T], given: Any, path: str, errors: Errors) -> T | None:
    """Return an object of a dataclass.

    Args:
        kind: The dataclass. Its groups of options may be dataclasses, too.
        given: The values in the file.
        path: Name of the group, for messages.
        errors: Takes all mistakes.
    """
    if isinstance(given, str):
        errors.add(f"{path} is {given!r}, which is no group of options. Write each under it.")
        return None
    _, values = read_object(given, path, errors)
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for name, value in values.items():
        if name not in known:
            nearest = get_close_matches(name, known, n=1)
            meant = f" Did you mean {nearest[0]!r}?" if nearest else ""
            errors.add(f"{path} has no option {name!r}.{meant}")
            continue
        group, is_word_too = _group_in(hints[name])
        if group is not None and (isinstance(value, dict) or not (is_word_too or value is None)):
            made_group = read_group(group, value, f"{path}.{name}", errors)
            arguments |= {} if made_group is None else {name: made_group}
            continue
        try:
            arguments[name] = _parsed(name, hints[name], value)
        except ArgumentError:
            arguments[name] = value  # the class may have better words
            refused[name] = f"{path}.{name} is {value!r}, which is no {known[name].type}."
    missing = [
        name
        for name, field in known.items()
        if name not in values and field.default is field.default_factory is MISSING
    ]
    if missing:
        errors.add(f"{path} lacks {', '.join(missing)}. Set {'them' if missing[1:] else 'it'}.")
        return None
    num_errors = len(errors.found)
    made = errors.attempt(kind, **arguments)
    new = errors.found[num_errors:]
    for name, message in refused.items():
        if not any(name in one for one in new):
            errors.add(message)
    return made


def _group_in(hint: Any) -> tuple[type[Any] | None, bool]:
    """Return the dataclass in the type of an option, and whether a word is fine, too. None: the
    option has a plain value.
    """
    kinds = [one for one in (get_args(hint) or (hint,)) if one is not NoneType]
    group = next((one for one in kinds if isinstance(one, type) and is_dataclass(one)), None)
    return group, len(kinds) > 1


def _parsed(name: str, hint: Any, value: Any) -> Any:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{name}", type=hint)
    return parser.parse_object({name: value})[name]
