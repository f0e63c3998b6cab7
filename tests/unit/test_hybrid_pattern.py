"""Pattern strings are read as Megatron-Core reads ``hybrid_layer_pattern``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lightning.config.hybrid_pattern import parse_hybrid_pattern, pattern_from_ratios
from megatron_lightning.errors import ConfigError

FACTS = json.loads(
    (Path(__file__).parents[1] / "oracles/families/hybrid_patterns.json").read_text()
)["facts"]


@pytest.mark.parametrize("fact", FACTS["patterns"], ids=lambda fact: repr(fact["pattern"]))
def test_patterns_are_parsed_or_refused_as_by_megatron(fact: dict[str, Any]) -> None:
    expected = fact["parsed"]
    if "error" in expected:
        with pytest.raises(ConfigError, match="layer_pattern"):
            parse_hybrid_pattern(fact["pattern"])
        return
    parsed = parse_hybrid_pattern(fact["pattern"])
    assert {"main": parsed.main, "mtp": parsed.mtp, "depths": parsed.depths} == expected
    assert len(parsed.letters) == fact["layers"]
    assert len(parsed.segments) == fact["segments"]
    assert parsed.counts() == fact["counts"]


def test_ratios_mean_a_pattern() -> None:
    for fact in FACTS["from_ratios"]:
        assert pattern_from_ratios(*fact["args"]) == fact["pattern"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("M*/M|M", r"has '\|' behind /, which ends a stage"),
        ("M /M", "has ' ', which is no layer"),
        ("M+/*", r"has \* and \+"),
        ("M*/MM/", "all depths have equal layers"),
    ],
)
def test_patterns_that_mean_nothing(pattern: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_hybrid_pattern(pattern)


def test_a_pattern_may_end_with_a_separator() -> None:
    assert parse_hybrid_pattern("M*/") == parse_hybrid_pattern("M*")
