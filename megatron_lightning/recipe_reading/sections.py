"""Configuration files and command-line options, merged like in LightningCLI: later values win, and
options go to the arguments of the named class. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from megatron_lightning.mistakes import Errors

_read_yaml = get_loader("yaml")
"""LightningCLI's: 1e-3 is a number, and a date is text."""


def read_sections(
    paths: Sequence[str], overrides: Sequence[str], errors: Errors
) -> Mapping[str, Any] | None:
    """Return the sections of all files, changed by ``overrides``, or None if a file cannot be read.

    Args:
        paths: Configuration files.
        overrides: Options such as "trainer.strategy.tensor_model_parallel_size=2".
        errors: Takes the mistakes.
    """
    parts = [_load(path, errors) for path in paths] + [_nested(one) for one in overrides]
    parts_read = [part for part in parts if part is not None]
    return reduce(_merged, parts_read) if len(parts_read) == len(parts) else None


def _load(path: str, errors: Errors) -> Mapping[str, Any] | None:
    try:
        sections = _read_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        errors.add(f"--config {path} cannot be read: {' '.join(str(error).split())}.")
        return None
    if not isinstance(sections, dict):
        errors.add(f"--config {path} holds no sections. Write trainer, model and data.")
        return None
    return sections


def _nested(override: str) -> Mapping[str, Any]:
    """Return {a: {b: value}} of "a.b=value", the value read as YAML."""
    name, _, text = override.partition("=")
    try:
        value = _read_yaml(text)
    except yaml.YAMLError:
        value = text
    for key in reversed(name.split(".")):
        value = {key: value}
    nested: Mapping[str, Any] = value
    return nested


def _merged(old: Any, new: Any) -> Any:
    if isinstance(new, dict):
        if isinstance(old, str):  # a class path before its arguments
            old = {"class_path": old}
        if isinstance(old, list) and old:  # arguments belong to the last object
            return [*old[:-1], _merged(old[-1], new)]
    if not isinstance(old, dict):
        return new
    if not isinstance(new, dict):
        return old if new is not None and new == old.get("class_path") else new
    if "class_path" in old and not new.keys() & {"class_path", "init_args"}:
        new = {"init_args": new}
    if new.get("class_path", old.get("class_path")) != old.get("class_path"):
        return new
    merged = dict(old)
    for key, value in new.items():
        name = key.removesuffix("+")
        found = old.get(name)
        merged[name] = _merged(found, value) if key == name else _appended(found, value)
    return merged


def _appended(old: Any, value: Any) -> list[Any]:
    """Return the list of an option with a trailing "+"."""
    values = old if isinstance(old, list) else [] if old is None else [old]
    return [*values, *(value if isinstance(value, list) else [value])]
