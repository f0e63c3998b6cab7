"""Time of a quantized linear layer's three products, compared with fp32's on one processor core.

    python -m benchmarks.bench_precision          # a minute; writes results/
    python -m benchmarks.bench_precision --quick  # a second, small: does it run?

Forward and backward of a product of 1,024 x 1,024 matrices, all variants in turn, so that other
load on the machine affects them alike. Processor seconds are compared: medians, and of the ratios
to fp32 of each round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.command_line import measured_page, print_page
from benchmarks.statistics import Ratio, ratio_of_medians, verdict
from megatron_lightning.layers.linear.gemm import Gemm, matmul
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.precision.emulation import EmulatedGemm
from megatron_lightning.precision.recipes import Scaling

SCALINGS: tuple[Scaling, ...] = ("delayed", "current", "rowwise", "blockwise", "mxfp8", "nvfp4")
GOAL = 6.0  # times fp32


class Size(NamedTuple):
    """Size of a measurement."""

    features: int = 1024
    rounds: int = 25


def step(gemm: Gemm, x: Tensor, w: Tensor, dy: Tensor) -> None:
    """Compute one layer's output and both gradients."""
    y = matmul(x, w, None, gemm)
    torch.autograd.grad(y, (x, w), dy)


def measure(size: Size) -> dict[str, list[float]]:
    """Return the processor seconds of each round, by variant; fp32 first."""
    torch.manual_seed(0)
    x, w = (torch.randn(size.features, size.features, requires_grad=True) for _ in range(2))
    dy = torch.randn(size.features, size.features)
    gemms: Mapping[str, Gemm] = {"fp32": Gemm()} | {
        scaling: EmulatedGemm(FP8Recipe(scaling=scaling), dtype=torch.float32)
        for scaling in SCALINGS
    }
    times: dict[str, list[float]] = {name: [] for name in gemms}
    for round_ in range(size.rounds + 1):
        for name, gemm in gemms.items():
            seconds = _timed(lambda gemm=gemm: step(gemm, x, w, dy))  # type: ignore[misc]
            if round_:  # the first warms up
                times[name].append(seconds)
    return times


def _timed(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def ratios(times: Mapping[str, list[float]]) -> dict[str, Ratio]:
    """Return how many times as long as fp32 each recipe takes."""
    return {
        name: ratio_of_medians(seconds, times["fp32"])
        for name, seconds in times.items()
        if name != "fp32"
    }


def page(times: Mapping[str, list[float]], size: Size) -> str:
    """Return the results as a page."""
    rows = [
        f"| {name} | {ratio} | {verdict(ratio.keeps(GOAL))} |"
        for name, ratio in ratios(times).items()
    ]
    width, fp32_ms = size.features, 1e3 * statistics.median(times["fp32"])
    return "\n".join(
        [
            f"Forward and backward of a {width} x {width} x {width} product, emulated, relative to "
            f"fp32's {fp32_ms:.1f} ms (goal: at most {GOAL:g}; one core, processor time).",
            "",
            "| scaling | times fp32 [95 %] | goal |",
            "| --- | --- | --- |",
            *rows,
            "",
        ]
    )


def run(size: Size, folder: Path | None) -> str:
    """Measure, and return the page; with a folder, keep it there."""

    def measured() -> tuple[str, Mapping[str, Any]]:
        times = measure(size)
        return page(times, size), {"seconds": times}

    return measured_page("Emulated products of 8 and 4 bits", "precision_cpu", measured, folder)


if __name__ == "__main__":
    print_page(__doc__, run, Size(), Size(64, 3))
