"""The benchmarks of experts, at sizes that measure nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_moe, gpu_moe
from benchmarks.gpu.cases import CASES
from benchmarks.moe_counts import choices
from megatron_lightning.config import MoEConfig


@pytest.mark.slow
def test_a_quick_run_compares_and_sends_what_theory_says(tmp_path: Path) -> None:
    page = bench_moe.run(bench_moe.QUICK, [bench_moe.QUICK], 2, tmp_path)
    assert "| ep1 | mixtral-eager | 1.50 |" in page and "| ep2 | ep1 |" in page
    counted = [line for line in page.splitlines() if "% |" in line and "±" not in line]
    assert len(counted) == 6 and all(" 1.000 | met |" in line for line in counted)
    (kept,) = tmp_path.glob("*.json")
    result = json.loads(kept.read_text())
    assert {name: len(rounds) for name, rounds in result["trainings"][0]["steps"].items()} == {
        "ep1": 2, "ep1-unfused": 2, "mixtral-eager": 2, "mixtral-grouped_mm": 2, "ep2": 2
    }  # fmt: skip
    crowded = result["counts"]["0.9"]
    assert crowded[0]["received"] > 2 * crowded[1]["received"]


def test_a_share_of_the_tokens_chooses_one_expert() -> None:
    moe = MoEConfig(num_experts=8, router_topk=2)
    for share in (0.0, 0.5, 0.9):
        chosen = choices(400, moe, share)
        assert (chosen.sort(1).values.diff(dim=1) > 0).all()  # different experts
        counts = chosen.flatten().bincount(minlength=8)
        assert counts.sum() == 800
        crowd = int(share * 400)
        assert counts[0] == crowd + (400 - crowd) * 2 // 8


def test_the_case_of_a_gpu_runs() -> None:
    def times_ms(work: Callable[[], Any]) -> list[float]:
        start = time.perf_counter()
        work()
        return [(time.perf_counter() - start) * 1e3]

    shape = replace(bench_moe.QUICK, num_layers=1)
    found = gpu_moe.layer_beside_others(shape, "cpu", times_ms)
    assert set(found["speed of transformers"]) == {"eager", "grouped_mm"}
    assert found["experts, crowded"]["ms"] > 0 and "moe" in CASES


def test_layers_of_equal_active_flops() -> None:
    config = bench_moe.QUICK.config
    experts, dense = bench_moe.layers_of(config)
    active = sum(w.numel() for w in experts.get_submodule("experts").parameters()) * 2 // 8
    assert active == sum(w.numel() for w in dense.parameters())
