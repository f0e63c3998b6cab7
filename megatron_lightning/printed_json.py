"""JSON that commands print for scripts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def json_text(
    values: Any, *, indent: int | None = 2, default: Callable[[Any], Any] | None = None
) -> str:
    """Return JSON that every parser reads: null stands for NaN and infinite numbers, for which JSON
    has no words.

    Args:
        values: Plain values.
        indent: Spaces a level. None: one line.
        default: Returns a plain value for any other object.
    """
    text = json.dumps(values, default=default)
    return json.dumps(json.loads(text, parse_constant=lambda _: None), indent=indent)
