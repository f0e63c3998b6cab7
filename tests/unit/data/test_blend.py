"""The order of a blend, bit for bit that of Megatron's helper on x86."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lightning.data.pretraining.blend_order import (
    Blend,
    blend_index,
    exhaustive_index,
    normalized,
)
from megatron_lightning.errors import ConfigError

FACTS = json.loads((Path(__file__).parents[2] / "oracles" / "datasets_blended.json").read_text())[
    "facts"
]


def _rule(weights: Any, size: int) -> Any:
    counts, picks = np.zeros(len(weights)), np.empty(size, np.int16)
    for t in range(size):
        picks[t] = np.argmax(weights * max(t, 1.0) - counts)
        counts[picks[t]] += 1
    return picks


@pytest.mark.parametrize("fact", FACTS["build_blending_indices"])
def test_weighted_oracle(fact: dict[str, Any]) -> None:
    picks = blend_index(np.array(fact["weights"]), fact["size"])
    table = Blend(picks, len(fact["weights"]))
    assert picks.tolist() == fact["dataset_index"]
    assert [table[i][1] for i in range(len(table))] == fact["dataset_sample_index"]


@pytest.mark.parametrize("fact", FACTS["build_exhaustive_blending_indices"])
def test_exhaustive_oracle(fact: dict[str, Any]) -> None:
    picks = exhaustive_index(fact["sizes"])
    table = Blend(picks, len(fact["sizes"]))
    assert picks.tolist() == fact["dataset_index"]
    assert [table[i][1] for i in range(len(table))] == fact["dataset_sample_index"]


def test_random_blends_follow_the_rule() -> None:
    random = np.random.default_rng(0)
    for case in range(25):
        num, size = int(random.integers(1, 61)), int(random.integers(1, 6000))
        weights = normalized(
            (
                random.random(num) + 1e-3,
                random.integers(1, 20, num) * 1.0,
                1 / np.arange(1, num + 1) ** 2.0,
                np.ones(num),
                10.0 ** random.uniform(-6, 0, num),
            )[case % 5]
        )
        picks = blend_index(weights, size, num_stretches=(None, 7, 64, 1000)[case % 4])
        assert (picks == _rule(weights, size)).all(), (case, num, size)
        table, middle = Blend(picks, num), size // 2
        assert (table.consumed(middle) == np.bincount(picks[:middle], minlength=num)).all()


def test_a_thousand_data_sets() -> None:
    weights = normalized(1 / np.arange(1, 1001))
    assert (blend_index(weights, 3000) == _rule(weights, 3000)).all()
    sizes = np.random.default_rng(1).integers(1, 40, 200)
    assert (np.bincount(exhaustive_index(sizes.tolist())) == sizes).all()


@pytest.mark.parametrize("weights", [[0.0, 1.0], [-1.0, 2.0], [float("nan")], [float("inf"), 1.0]])
def test_weights_that_cannot_be(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="each must be a number above 0"):
        normalized(weights)
