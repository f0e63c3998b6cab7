"""The pipeline benchmark's formulas, and a run of it that is too small to measure anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.bench_pipeline import GOALS, run
from benchmarks.pipeline_stages import SCHEDULES, Case
from megatron_lightning.pipeline import schedules
from megatron_lightning.pipeline.schedules import simulate


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_formulas_are_what_the_tables_take(name: str, ranks: int) -> None:
    """In units of one forward, input gradient or weight gradient of a whole rank."""
    case = Case(name, ranks, 2 * ranks, 1.0, 1)
    table = schedules.make_schedule(
        name, num_ranks=ranks, num_microbatches=2 * ranks, num_chunks=case.chunks
    )
    assert set(GOALS) == set(SCHEDULES)
    assert simulate.simulate(table).step_time / case.chunks == pytest.approx(case.ideal_s)


@pytest.mark.slow
def test_a_quick_run_keeps_every_measurement(tmp_path: Path) -> None:
    page = run([2], 0.002, 2, tmp_path)
    (kept,) = tmp_path.glob("*.json")
    (result,) = json.loads(kept.read_text())["results"]
    assert {name: len(times) for name, times in result["step_s"].items()} == dict.fromkeys(
        result["step_s"], 2
    )
    assert len(result["peak_mib"]) == 2 * len(SCHEDULES) and page.count("| 2 x 4 |") == len(
        SCHEDULES
    )
