"""JSON that commands print."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NoReturn

import pytest

from megatron_lightning.printed_json import json_text


def _strict(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_are_null(number: float) -> None:
    text = json_text({"relative": [number, 0.5], "said": "NaN", "path": Path("a")}, default=str)
    found = json.loads(text, parse_constant=_strict)
    assert found == {"relative": [None, 0.5], "said": "NaN", "path": "a"}
    assert json_text({"a": 1}, indent=None) == '{"a": 1}'
    with pytest.raises(TypeError):
        json_text({"path": Path("a")})
