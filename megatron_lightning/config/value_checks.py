"""Checks shared by the options."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lightning.errors import ConfigError


def is_count(value: object) -> bool:
    """Return whether a value is a positive integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_counts(options: object, *names: str) -> None:
    """Check that fields are positive integers, or None.

    Raises:
        ConfigError: Naming a field with another value.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and not is_count(value):
            raise ConfigError(f"{name} is {value!r}; it must be a positive integer.")


def check_kind(name: str, value: object, kind: type) -> None:
    """Check that a value is an object of a class, such as a group of options.

    Raises:
        ConfigError: If the value is of another class.
    """
    if not isinstance(value, kind):
        raise ConfigError(
            f"{name} is {value!r}, and must be a {kind.__name__}. Set it to {kind.__name__}(...)."
        )


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Check that a value is among the known choices.

    Raises:
        ConfigError: If the value is unknown.
    """
    if value not in choices:
        raise ConfigError(
            f"{name} is {value!r}, which is unknown. Set it to one of {', '.join(choices)}."
        )
