"""Groups of options in a configuration file, read by jsonargparse as for ``fit``. No torch here."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
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
    options = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    is_complete = _check_names(options, values, path, errors)
    hints = get_type_hints(kind)
    arguments: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for name, value in values.items():
        if name not in options:
            continue
        group = _group_of(hints[name], value)
        if group is not None:
            made_group = read_group(group, value, f"{path}.{name}", errors)
            arguments |= {} if made_group is None else {name: made_group}
            continue
        try:
            arguments[name] = _parsed(name, hints[name], value)
        except ArgumentError:
            arguments[name] = value  # the class may have better words
            refused[name] = f"{path}.{name} is {value!r}, which is no {options[name].type}."
    if not is_complete:
        return None
    num_errors = len(errors.found)
    made = errors.attempt(kind, **arguments)
    said = errors.found[num_errors:]
    for name, message in refused.items():
        if not any(name in one for one in said):
            errors.add(message)
    return made


def _check_names(
    options: Mapping[str, Field[Any]], values: Mapping[str, Any], path: str, errors: Errors
) -> bool:
    """Record names that are no options. Return whether all options without a default are set."""
    for name in [name for name in values if name not in options]:
        nearest = get_close_matches(name, options, n=1)
        meant = f" Did you mean {nearest[0]!r}?" if nearest else ""
        errors.add(f"{path} has no option {name!r}.{meant}")
    needed = [
        name for name, one in options.items() if one.default is one.default_factory is MISSING
    ]
    missing = [name for name in needed if name not in values]
    if missing:
        errors.add(f"{path} lacks {', '.join(missing)}. Set {'them' if missing[1:] else 'it'}.")
    return not missing


def _group_of(hint: Any, value: Any) -> type[Any] | None:
    """Return the dataclass that reads the value of an option. None: the value is plain, or a word
    where a word is fine, too.
    """
    kinds = [one for one in (get_args(hint) or (hint,)) if one is not NoneType]
    group = next((one for one in kinds if isinstance(one, type) and is_dataclass(one)), None)
    is_plain = not isinstance(value, dict) and (len(kinds) > 1 or value is None)
    return None if is_plain else group


def _parsed(name: str, hint: Any, value: Any) -> Any:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{name}", type=hint)
    return parser.parse_object({name: value})[name]
