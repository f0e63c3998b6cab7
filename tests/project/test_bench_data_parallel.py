"""The arithmetic of the data-parallel benchmark, and one real count."""

from __future__ import annotations

import pytest

from benchmarks.bench_data_parallel import Result, layer_seconds, markdown
from benchmarks.bench_step import DEEP, QUICK, SHALLOW
from benchmarks.data_parallel_counts import Count, _padded, count
from benchmarks.statistics import Ratio
from benchmarks.teams import StepTime


def test_padding_follows_the_layout():
    assert _padded([10, 500], 1) == 64 + 512
    assert _padded([10, 500], 3) == 768


def test_a_layer_is_the_difference_of_two_depths():
    def steps(seconds: float) -> dict[str, list[list[StepTime]]]:
        return {"dp2": [[StepTime(9.0, 9.0, 1.0, 0, seconds), StepTime(9.0, 9.0, 1.0, 0, 7.0)]] * 2}

    assert layer_seconds(steps(1.0), steps(1.0 + DEEP - SHALLOW), "dp2") == [1.0, 1.0]


def test_a_step_sends_and_keeps_what_theory_says():
    counted = count("zero1", 2, QUICK.config)
    assert counted.sends_what_it_should, counted
    assert set(counted.sent) == {"reduce_scatter", "all_gather", "all_reduce"}
    # the padding of a tiny model is a large part of it
    assert counted.bytes_a_parameter == pytest.approx(12 * (1 + counted.padding), rel=0.02)


def test_the_page_says_what_is_met():
    good = Count("zero1", 2, 10, {"reduce_scatter": 40}, {"reduce_scatter": 40}, 0.0, 12.1, 12.0)
    facts = {
        "date": "2026-01-01",
        "machine": "m",
        "cores": 2,
        "memory_gib": 1,
        "versions": {"torch": "x"},
        "commit": "c",
    }
    facts |= {"load_average": 1, "load_average_at_end": 1, "rounds": 2, "loss_difference": 0.0}
    ratio, slow = Ratio(1.0, 0.9, 1.1), Ratio(0.5, 0.4, 0.6)
    result = Result(
        facts,
        [good],
        {"dp2": 1e-4},
        {"dp2": ratio},
        {"dp2": 1.0},
        {"dp2": {"lightning-ddp2": slow}},
    )
    page = markdown(result, QUICK)
    assert "| zero1 | 2 | 4.0000 | 4.0000 | yes | 0.00% | 12.100 | 12.000 | yes |" in page
    assert "| dp2 | 100 | 1.000 [0.900, 1.100] | met |" in page
    assert "0.500 [0.400, 0.600], missed" in page
