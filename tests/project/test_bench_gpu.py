"""The trainings of ``benchmarks.bench_gpu`` on the CPU, where nothing is timed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks import bench_gpu
from benchmarks.bench_step import QUICK
from benchmarks.gpu import cases
from benchmarks.variants import Shape, Variant

EAGER = ("ours, eager", "transformers, eager")


def _train(variant: Variant, shape: Shape, limit_s: float) -> dict[str, Any]:
    if shape.batch > 2:
        return {"refused": "out of memory"}
    return bench_gpu.train(variant, shape)


def test_every_trainer_runs_at_the_largest_batch_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "in_a_process", _train)
    monkeypatch.setattr(bench_gpu, "measured_peak", lambda shape: 1e12)
    monkeypatch.setattr(
        bench_gpu, "rates_of", lambda shape, s: {"tokens_per_s": shape.tokens / s, "tflops": 0.5}
    )
    shape = replace(QUICK, precision="bf16-mixed")
    found = {name: bench_gpu.largest_batch(name, shape, (4, 2, 1)) for name in EAGER}
    for numbers in found.values():
        assert numbers["batch"] == 2
        assert numbers["batch 4"] == "out of memory"
        assert len(numbers["wall_s"]) == bench_gpu.NUM_STEPS and numbers["first_s"] > 0.0
        assert numbers["of measured peak"] == 0.5
    # Of one task: the models draw other weights, so that first losses are near ln(vocabulary).
    assert found[EAGER[0]]["loss"] == pytest.approx(found[EAGER[1]]["loss"], rel=0.02)


def test_ours_is_compared_where_the_rivals_ran() -> None:
    speeds = dict(zip((bench_gpu.OURS, *bench_gpu.RIVALS), (12.0, 8.0, 10.0), strict=True))
    measured = {
        f"1 B: {name}": {"tokens_per_s": speed, "of measured peak": 0.6}
        for name, speed in speeds.items()
    }
    assert bench_gpu.beside_rivals(measured) == {
        "1 B, compared": {
            "of measured peak": [0.6, "goal 0.55"],
            "speed of best rival": [1.2, "goal 1.05"],
        }
    }
    measured[f"1 B: {bench_gpu.RIVALS[0]}"] = {"failed": "out of memory"}
    assert bench_gpu.beside_rivals(measured) == {}
    first = [name for name, _ in zip(cases.ITEMS, range(3), strict=False)]
    assert first == [f"training/{name}" for name in bench_gpu.CASES["training"]][:3]
