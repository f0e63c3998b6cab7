"""Attention of ranks that share a sequence, compared with one process that has all of it.

    python -m benchmarks.bench_context          # 15 rounds, 3 minutes; writes results/
    python -m benchmarks.bench_context --quick  # short sequences, two rounds: does it run?

One causal attention layer, forward and backward, fp32, one thread a rank. On two ranks both take
turns with one process: a round is a step of each. *Host* is one process that plays one of four
ranks of a ring: all blocks of its queries with their merges, against the calls of the kernels
alone. *Saved* is what autograd keeps for backward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import machine
from benchmarks.ranks import run
from benchmarks.statistics import Ratio, ratio_of_medians
from megatron_lightning.layers.context.backends import BACKENDS
from megatron_lightning.layers.context.blocks import blocks
from megatron_lightning.layers.context.kernels import Inputs, Output, kernel_for
from megatron_lightning.layers.context.merged import Merged
from megatron_lightning.layers.context.ring import RingAttention
from megatron_lightning.layers.sequence_info import SequenceInfo
from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.parallel.context import AxisGroup
from megatron_lightning.parallel.sequence import SequencePart

HEADS, GROUPS, HEAD_SIZE, BATCH = 8, 8, 64, 1
SPEEDUP_GOAL, HOST_LIMIT, SAVED_TOLERANCE = 1.6, 1.15, 0.02
SCALE = HEAD_SIZE**-0.5


class Pair(NamedTuple):
    """Times of one backend on two ranks and of one process, and what autograd saves on each."""

    shared_s: list[float]
    alone_s: list[float]
    saved: int
    saved_alone: int


def _inputs(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, heads, length, HEAD_SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _step(attention: Callable[..., Tensor], inputs: Sequence[Tensor]) -> int:
    """Run forward and backward; return the bytes that autograd has saved."""
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    q, k, v = (x.detach().requires_grad_() for x in inputs)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attention(q, k, v, SequenceInfo(), SCALE)
    out.backward(torch.ones_like(out))
    return sum(saved.values())


def _measure_pair(backend: str, length: int, rounds: int) -> Pair:
    context = ParallelContext(ParallelLayout(context_parallel_size=2))
    alone = RingAttention(AxisGroup("cp", (0,), 0, None))
    shared = BACKENDS[backend](context)
    full = _inputs(length)
    local = [SequencePart(context.cp.rank, 2).split(x, 2) for x in full]
    times: dict[str, list[float]] = {"shared": [], "alone": []}
    saved = saved_alone = 0
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        saved = _step(shared, local)
        dist.barrier()
        times["shared"].append(time.perf_counter() - start)
        if context.rank == 0:  # the other one waits and uses no processor
            start = time.perf_counter()
            saved_alone = _step(alone, full)
            times["alone"].append(time.perf_counter() - start)
        dist.barrier()
    return Pair(times["shared"][1:], times["alone"][1:], saved, saved_alone)


def _measure_host(length: int, rounds: int) -> tuple[list[float], list[float]]:
    """Return seconds of the blocks of rank 0 of 4 with their merges, and of the kernels alone."""
    torch.set_num_threads(1)
    kernel, part = kernel_for(torch.device("cpu")), SequencePart(0, 4)
    q, k, v = (part.split(x, 2) for x in _inputs(length))
    queries = part.spans(length)
    steps = [
        blocks(queries, SequencePart(rank, 4).spans(length), causal=True, window=None)
        for rank in range(4)
    ]
    visible = [block for step in steps for block in step]

    def forward(*, merges: bool) -> None:
        merged = Merged(q, SCALE)
        for block in visible:
            at, to = block.queries, block.keys
            output = kernel.forward(Inputs(q[:, :, at], k[:, :, to], v[:, :, to]), block, SCALE)
            if merges:
                merged.add(at, output)

    def backward(*, merges: bool) -> None:
        out, log_sum = torch.zeros_like(q), torch.full(q.shape[:3], 20.0)
        grad_q, sums = torch.zeros_like(q), torch.zeros(2, *k.shape)
        for block in visible:
            at, to = block.queries, block.keys
            inputs = Inputs(q[:, :, at], k[:, :, to], v[:, :, to])
            output = Output(out[:, :, at], log_sum[:, :, at])
            parts = kernel.backward(q[:, :, at], inputs, output, block, SCALE)
            if merges:
                grad_q[:, :, at] += parts.q
                sums[0, :, :, to] += parts.k
                sums[1, :, :, to] += parts.v

    ring, kernels = [], []
    for _ in range(rounds + 1):
        for times, merges in ((ring, True), (kernels, False)):
            start = time.perf_counter()
            forward(merges=merges)
            backward(merges=merges)
            times.append(time.perf_counter() - start)
    return ring[1:], kernels[1:]


def _row(name: str, found: Pair) -> tuple[list[str], Ratio]:
    ratio = ratio_of_medians(found.alone_s, found.shared_s)
    part = found.saved / found.saved_alone
    return [
        name,
        f"{statistics.median(found.shared_s) * 1e3:.0f}",
        f"{statistics.median(found.alone_s) * 1e3:.0f}",
        str(ratio),
        "met" if ratio.meets(SPEEDUP_GOAL) else "missed",
        f"{part:.3f}",
        "met" if abs(part / 0.5 - 1) <= SAVED_TOLERANCE else "missed",
    ], ratio


def main() -> None:
    """Measure, print the page, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    length, rounds = (256, 2) if options.quick else (4096, 15)
    facts: dict[str, Any] = machine.describe()
    rows, numbers = [], {}
    for backend in BACKENDS:
        if backend == "a2a+p2p":  # on two ranks one of the others
            continue
        pairs = run(2, _measure_pair, backend, length, rounds, limit_s=600.0)
        row, _ = _row(backend, pairs[0])
        rows.append(row)
        numbers[backend] = pairs[0]._asdict()
    host = ratio_of_medians(*_measure_host(length, rounds))
    facts["load_average_at_end"] = machine.describe()["load_average"]
    page = "\n".join(
        [
            f"# Attention over shared sequences, {facts['date'][:10]}",
            "",
            f"{machine.headline(facts)}.",
            "",
            f"Sequence {length}, {HEADS} heads of {HEAD_SIZE}, batch {BATCH}, {rounds} rounds in "
            "turns, one thread a rank; 95 % bootstrap intervals.",
            "",
            f"| | 2 ranks ms | one ms | speedup | goal {SPEEDUP_GOAL} | saved | goal 1/2 |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
            f"Ring of 4, host: {host} times its kernels, limit {HOST_LIMIT} "
            f"{'met' if host.keeps(HOST_LIMIT) else 'missed'}.",
            "",
        ]
    )
    if not options.quick:
        machine.keep(machine.RESULTS, "context_cpu", facts, page, numbers)
    print(page)


if __name__ == "__main__":
    main()
