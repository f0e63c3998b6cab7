"""The trainings of ``benchmarks.bench_gpu`` on the CPU, where nothing is timed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks import bench_gpu, gpu
from benchmarks.bench_step import QUICK
from benchmarks.variants import Shape, Variant

EAGER = ("ours, eager", "transformers, eager")


def _train(variant: Variant, shape: Shape, limit_s: float) -> dict[str, Any]:
    if shape.batch > 2:
        return {"refused": "out of memory"}
    return bench_gpu.train(variant, shape)


def test_every_trainer_runs_at_the_largest_batch_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    trainers = {name: bench_gpu.TRAINERS[name] for name in EAGER}
    monkeypatch.setattr(
        bench_gpu, "TRAINERS", trainers | {"ours, compiled": trainers["ours, eager"]}
    )
    monkeypatch.setattr(bench_gpu, "RIVALS", EAGER[1:])
    monkeypatch.setattr(bench_gpu, "in_a_process", _train)
    monkeypatch.setattr(bench_gpu, "measured_peak", lambda shape: 1e12)
    monkeypatch.setattr(
        bench_gpu, "rates_of", lambda shape, s: {"tokens_per_s": shape.tokens / s, "tflops": 0.5}
    )
    found = bench_gpu.beside_rivals(replace(QUICK, precision="bf16-mixed"), (4, 2, 1))
    for name in EAGER:
        assert found[name]["batch"] == 2
        assert found[name]["batch 4"] == "out of memory"
        assert len(found[name]["wall_s"]) == bench_gpu.NUM_STEPS and found[name]["first_s"] > 0.0
    # Of one task: the models draw other weights, so that first losses are near ln(vocabulary).
    assert found[EAGER[0]]["loss"] == pytest.approx(found[EAGER[1]]["loss"], rel=0.02)
    assert found["of measured peak"] == [0.5, "goal 0.55"]
    assert found["speed of best rival"][0] > 0.0
    assert "training" in gpu.CASES
