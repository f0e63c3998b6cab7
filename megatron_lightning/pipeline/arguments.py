"""Lists and dicts that a unit is given and changes, and so hands on by another way than its
output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
    """Return the lengths of the lists and dicts among the arguments of a call."""
    return [len(x) for x in (*args, *kwargs.values()) if isinstance(x, list | dict)]


class Containers:
    """Lists and dicts among the arguments of a call, as they were before it."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, list | dict)]
        self._before = [(container, _entries(container)) for container in given]

    @property
    def changed(self) -> str | None:
        """Return the type of one that the call has changed; None: there is none."""
        kinds = (type(c).__name__ for c, before in self._before if _entries(c) != before)
        return next(kinds, None)


def _entries(container: list[Any] | dict[Any, Any]) -> list[tuple[Any, int]]:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    return [(key, id(value)) for key, value in items]
