"""Layers that ``adapter_config.json`` describes, matched as ``peft`` matches them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_lightning.errors import ConfigError

_FIRST_NUMBER = r".*?\.[^.]*\.(?P<number>\d+)\."


class FolderTargets(NamedTuple):
    """Layers to adapt, by a folder's configuration. ``peft`` writes "all-linear" as names."""

    modules: str | Sequence[str]
    """Regular expression of full paths, or names and ends of paths."""
    excluded: str | Sequence[str]
    saved: Sequence[str]
    """``modules_to_save``, without adapters inside."""
    numbers: Sequence[int]
    """``layers_to_transform``. Empty: all layers."""
    patterns: Sequence[str]
    """``layers_pattern``: names of the lists of layers."""
    parameters: Sequence[str]
    """``target_parameters``."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> FolderTargets | None:
        """Return the targets of a configuration. None: the configuration does not name them."""
        modules = config.get("target_modules") or ()
        if modules == "all-linear":
            return None
        numbers, patterns = config.get("layers_to_transform"), config.get("layers_pattern")
        return cls(
            modules,
            config.get("exclude_modules") or (),
            tuple(config.get("modules_to_save") or ()),
            (numbers,) if isinstance(numbers, int) else tuple(numbers or ()),
            (patterns,) if isinstance(patterns, str) else tuple(patterns or ()),
            tuple(config.get("target_parameters") or ()),
        )

    def mean(self, path: str) -> bool:
        """Return whether the configuration means the layer at ``path``."""
        if self.excluded and _matches(self.excluded, path):
            return False
        if any(_expression(rf"(^|.*\.){name}($|\..*)").match(path) for name in self.saved):
            return False
        if not _matches(self.modules, path):
            return False
        is_full = isinstance(self.modules, str) or path in self.modules
        return is_full or not self.numbers or self._number_of(path) in self.numbers

    def mean_parameter(self, path: str) -> bool:
        """Return whether the configuration means the stacked experts at ``path``."""
        return any(path == end or path.endswith(f".{end}") for end in self.parameters)

    def _number_of(self, path: str) -> int | None:
        """Return the number of the layer in the list of layers."""
        expressions = [rf"(?:^|.*?\.){p}\.(?P<number>\d+)\." for p in self.patterns]
        for expression in expressions or [_FIRST_NUMBER]:
            if match := _expression(expression).match(path):
                return int(match["number"])
        return None


def _matches(patterns: str | Sequence[str], path: str) -> bool:
    if isinstance(patterns, str):
        return _expression(patterns).fullmatch(path) is not None
    return any(path == name or path.endswith(f".{name}") for name in patterns)


def _expression(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(
            f"adapter_config.json has the regular expression {text!r}, which is none ({error}). "
            "Restore the folder."
        ) from error
