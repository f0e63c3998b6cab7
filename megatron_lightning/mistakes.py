"""Mistakes in a configuration file, collected so that one run reports all. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megatron_lightning.errors import ConfigError

T = TypeVar("T")


@dataclass
class Errors:
    """Messages of the mistakes found so far."""

    found: list[str] = field(default_factory=list)

    def attempt(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        """Return the function's result, or None after recording a :class:`ConfigError`."""
        try:
            return function(*args, **kwargs)
        except ConfigError as error:
            self.add(str(error))
        except (TypeError, ValueError, AttributeError) as error:
            # A value of a kind unforeseen by the check, such as text for a number.
            self.add(f"a value in the file has the wrong type: {error}.")
        return None

    def add(self, message: str) -> None:
        """Record a message, once."""
        if message not in self.found:
            self.found.append(message)
