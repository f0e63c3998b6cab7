"""Lists, dicts and dataclasses that a unit is given and changes, and so hands on by another way
than its output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
    """Return the lengths of the lists and dicts among the arguments of a call."""
    return [len(x) for x in (*args, *kwargs.values()) if isinstance(x, list | dict)]


class Containers:
    """Lists, dicts and dataclasses among the arguments of a call, as they were before it."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, list | dict) or _is_data(x)]
        self._before = [(container, _entries(container)) for container in given]

    def changed(self, output: Any, *, is_copy: bool) -> str | None:
        """Return the type of one that the call has changed; None: there is none.

        Args:
            output: What the call returned; a dataclass that it fills and returns is handed on.
            is_copy: Whether it is a copy of what the call returned.
        """
        for container, before in self._before:
            same = type(container) is type(output) if is_copy else container is output
            if not (same and _is_data(output)) and _entries(container) != before:
                return type(container).__name__
        return None


def _is_data(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _entries(container: Any) -> list[tuple[Any, int]]:
    if _is_data(container):
        container = {
            field.name: getattr(container, field.name, None) for field in fields(container)
        }
    items = container.items() if isinstance(container, dict) else enumerate(container)
    return [(key, id(value)) for key, value in items]
