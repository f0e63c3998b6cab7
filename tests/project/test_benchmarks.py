"""The benchmarks' arithmetic, and runs of them that are too small to measure anything."""

from __future__ import annotations

import json
import time

import pytest
import torch
import torch.nn.functional as F

from benchmarks import bench_context, bench_precision, gpu_cases, gpu_precision
from benchmarks.bench_checkpoint import run as run_checkpoints
from benchmarks.bench_step import QUICK, compare, judgment, largest_loss_difference, run
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.cases import CASES, run_items
from benchmarks.gpu.record import Record, markdown
from benchmarks.gpu_cases import Item
from benchmarks.statistics import ratio_of_medians
from benchmarks.teams import StepTime
from benchmarks.variants import Goal
from megatron_lightning.cards.header import read_record
from megatron_lightning.parallel.sequence import SequencePart, join
from megatron_lightning.precision.backends import Gpu


def _steps(wall: list[float], loss: float = 1.0) -> list[list[StepTime]]:
    return [
        [StepTime(seconds / 2, seconds, loss, 0), StepTime(seconds, 9.0, loss, 0)]
        for seconds in wall
    ]


def test_noise_that_hits_both_of_a_pair_leaves_the_ratio_alone():
    noise = [1.0, 5.0, 2.0, 9.0, 3.0]
    ratio = ratio_of_medians([2.0 * x for x in noise], noise)
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 2.0, 2.0)
    assert ratio.meets(2.05)
    assert not ratio.meets(2.06)


def test_the_interval_covers_a_ratio_that_varies():
    ratio = ratio_of_medians([1.0, 2.0, 3.0, 2.0, 2.0, 1.5], [1.0] * 6)
    assert 1.0 <= ratio.low < ratio.value == 2.0 < ratio.high <= 3.0


def test_a_series_without_its_pair_is_refused():
    with pytest.raises(ValueError, match="2 and 1 measurements are no pairs"):
        ratio_of_medians([1.0, 2.0], [1.0])


def test_the_slowest_rank_and_rank_zero_count_and_the_bubble_is_wall_time_only():
    steps = {"pp2": _steps([1.25] * 3), "dp2": _steps([1.0] * 3)}
    comparison = compare(steps, Goal(ours="pp2", peer="dp2", ratio=0.95, ideal=0.8))
    assert comparison.wall.value == pytest.approx(1.0)  # 1.25 times slower is all bubble
    assert comparison.cpu.value == pytest.approx(0.8)
    assert judgment(comparison) == "wall met"


def test_losses_that_differ_are_noticed():
    assert largest_loss_difference(
        {"a": _steps([1.0], loss=2.0), "b": _steps([1.0], loss=2.2)}
    ) == pytest.approx(0.1)


def test_a_quick_run_compares_layouts_and_keeps_every_step(tmp_path):
    page = run(["single", "lightning-single", "tp2"], QUICK, 2, with_host=False, folder=tmp_path)
    assert "| single | lightning-single | 0.98 |" in page
    (kept,) = tmp_path.glob("*.json")
    result = json.loads(kept.read_text())
    assert {name: (len(steps), len(steps[0])) for name, steps in result["steps"].items()} == {
        "single": (2, 1),
        "lightning-single": (2, 1),
        "tp2": (2, 2),
    }
    assert result["header"]["loss_difference"] < 1e-5  # fp32, two steps
    assert read_record(kept.with_suffix(".md"))["page"] == page


@pytest.mark.slow
def test_a_quick_checkpoint_run_measures_everything_and_cleans_up(tmp_path):
    page = run_checkpoints(4 << 20, 2, tmp_path / "disk", tmp_path / "results", num_ranks=128)
    assert "save, speed relative to DCP" in page and "manifest of 128 ranks" in page
    (kept,) = (tmp_path / "results").glob("*.json")
    result = json.loads(kept.read_text())
    assert len(result["rounds"]) == 2 and all(
        seconds > 0 for seconds in result["rounds"][0].values()
    )
    assert 4.05e11 < result["manifest"]["num_parameters"] < 4.07e11  # the model's published size
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.slow
def test_a_quick_run_of_shared_sequences_sends_and_keeps_what_theory_says(tmp_path):
    page = bench_context.measure(256, 2, tmp_path)
    counted = [line for line in page.splitlines() if "float32 |" in line or "bfloat16 |" in line]
    assert len(counted) == 8 and "missed" not in "".join(counted)
    (kept,) = tmp_path.glob("*.json")
    result = json.loads(kept.read_text())
    assert {name: len(rows["one_s"]) for name, rows in result["documents"].items()} == {
        "one process": 2,
        "2 ranks, p2p": 2,
    }
    assert read_record(kept.with_suffix(".md"))["page"] == page


def test_one_process_that_plays_all_ranks_of_a_ring_computes_attention():
    num_ranks, shapes = 4, [(1, heads, 64, 8) for heads in (4, 2, 2, 4)]
    q, k, v, grad = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    ranks = [SequencePart(rank, num_ranks) for rank in range(num_ranks)]
    parts = [torch.stack([part.split(k, 2), part.split(v, 2)]) for part in ranks]
    found = [
        list(gpu_cases.steps_of_a_ring(part.split(q, 2), parts, part, part.split(grad, 2)))
        for part in ranks
    ]
    full = [x.requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*full, is_causal=True, enable_gqa=True)
    out.backward(grad)
    of_keys = join([sum(steps) for steps in zip(*(x[1:-1] for x in found), strict=True)], 3)
    torch.testing.assert_close(join([x[0] for x in found], 2), out.detach())
    torch.testing.assert_close(join([x[-1] for x in found], 2), q.grad)
    torch.testing.assert_close(of_keys, torch.stack([k.grad, v.grad]))


@pytest.mark.parametrize("length", [64, 128])
def test_the_cases_of_long_sequences_run(monkeypatch, length):
    """On the CPU, where nothing is timed."""

    def run_once(work, num_tokens):
        work()
        return {"tokens_per_s": num_tokens}

    monkeypatch.setattr(gpu_cases, "_attention_numbers", run_once)
    ring = gpu_cases.rank_of_a_ring(length, 8, "cpu")
    packed = gpu_cases.packed_row(length, 4, "cpu")
    assert ring["rank of 8"] == {"tokens_per_s": length // 8}
    assert (ring["speed_relative_to_flash"], packed["speed_relative_to_flash"]) == (1 / 8, 1.0)
    assert packed["4 documents"] == packed["flash, all of it"] == {"tokens_per_s": length}
    assert set(gpu_cases.CASES) == {"step", "attention", "context"}


def _raise() -> dict[str, float]:
    raise RuntimeError("out of memory")


def test_a_gpu_case_continues_with_what_is_missing_and_survives_a_failure(tmp_path, capsys):
    path, deadline = tmp_path / "case.json", time.monotonic() + 60.0
    items = {
        "fast": Item(1.0, lambda: {"ms": 2.0}),
        "broken": Item(1.0, _raise),
        "long": Item(100.0, lambda: {"ms": 3.0}),
    }
    assert run_items(items, Record(path, resume=True), deadline) == 2
    assert "long: left for the next run" in capsys.readouterr().out
    items |= {"fast": Item(1.0, _raise), "broken": Item(1.0, lambda: {"ms": 4.0})}
    record = Record(path, resume=True)
    assert run_items(items, record, time.monotonic() + 200.0) == 0
    assert "fast: measured before" in capsys.readouterr().out
    assert {
        name: entry["numbers"]["ms"] for name, entry in read_record(path)["entries"].items()
    } == {
        "fast": 2.0,
        "broken": 4.0,
        "long": 3.0,
    }
    assert "| ms | 4.0 |" in markdown(record)


@pytest.mark.spread(1)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [[], ["--case", "step"], ["--case", ""]])
def test_without_a_gpu_the_programs_say_so(capsys, arguments):
    assert gpu.main(arguments) == 0
    assert "no GPU" in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["native", "emulation"])
def test_trainings_with_fp8_run(monkeypatch, backend):
    """On the CPU, uncompiled, where nothing is timed; native products that have CPU kernels."""
    shape = gpu_cases.Shape(
        num_layers=1, hidden_size=32, num_heads=2, num_groups=2, ffn_size=32, vocab_size=32,
        sequence=16, batch=2,
    )  # fmt: skip
    hopper = Gpu("NVIDIA H100", (9, 0), (12, 9))
    native = gpu_precision.variants("native", hopper)
    names = ["bf16", *(f"{name}, native" for name in ("delayed", "current", "rowwise"))]
    assert [*native] == [*names, "blockwise, native", "bf16, at the end"]
    monkeypatch.setattr(
        gpu_precision, "timed", lambda shape, work, _: {"times_ms": [float(work())]}
    )
    monkeypatch.setattr(torch.nn.Module, "compile", lambda _: None)
    if backend == "native":
        monkeypatch.setattr(
            gpu_precision, "variants", lambda *_: {name: native[name] for name in names}
        )
    numbers = gpu_precision.trainings(shape, backend, "cpu")
    losses = {name: found["times_ms"][0] for name, found in numbers.items() if name != "goal"}
    assert len(losses) == (4 if backend == "native" else 8)
    for name, loss in losses.items():
        assert loss == pytest.approx(losses["bf16"], rel=1e-2)
        assert (loss == losses["bf16"]) == name.startswith("bf16")
    assert "precision" in CASES


def test_quantized_products_are_measured() -> None:
    page = bench_precision.run(bench_precision.Size(32, 2), None)
    assert all(f"| {scaling} |" in page for scaling in bench_precision.SCALINGS)


def test_chats_with_images_are_measured() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("PIL")
    from benchmarks import bench_images

    page = bench_images.run(bench_images.Size(2, 56, 84, 4, 256), None)
    assert all(f"| {goal} |" in page for goal in bench_images.GOALS)
    assert "| growth of a worker over 4 rows |" in page
