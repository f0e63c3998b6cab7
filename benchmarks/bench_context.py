"""Attention of ranks that share a sequence: time, bytes sent, bytes kept, and rows of documents.

    python -m benchmarks.bench_context          # 15 rounds, 5 minutes; writes results/
    python -m benchmarks.bench_context --quick  # short sequences, two rounds: does it run?

One causal attention layer, forward and backward, fp32, one thread a rank. On two ranks both take
turns with one process: a round is a step of each. *Host* is one process that plays one of four
ranks of a ring: all blocks of its queries with their merges, against the calls of the kernels
alone. *Saved* is what autograd keeps for backward. *Sent* and *peak* are counts of rank 0, see
``context_counts``. *Documents*: a row of eight takes turns with a row of one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import machine
from benchmarks.context_counts import (
    PEAK_TOLERANCE,
    Case,
    Counted,
    count,
    expected_peak_bytes,
    expected_sent_bytes,
)
from benchmarks.ranks import run
from benchmarks.statistics import Ratio, ratio_of_medians, verdict
from megatron_lightning.layers.attention.sequence_info import Documents, SequenceInfo
from megatron_lightning.layers.context.backends import BACKENDS
from megatron_lightning.layers.context.blocks import visible_blocks
from megatron_lightning.layers.context.kernel_choice import kernel_for
from megatron_lightning.layers.context.kernels import Inputs, Output
from megatron_lightning.layers.context.local import LocalAttention
from megatron_lightning.layers.context.merged import Merged, Sharing
from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.parallel.grid.context import ALONE
from megatron_lightning.parallel.sequence import SequencePart

HEADS, GROUPS, HEAD_SIZE, BATCH = 8, 8, 64, 1
NUM_DOCUMENTS = 8
SPEEDUP_GOAL, HOST_LIMIT, SAVED_TOLERANCE, DOCUMENTS_LIMIT = 1.6, 1.15, 0.02, 0.25
SCALE = HEAD_SIZE**-0.5
LEVELS = (2, 2)
"""Of ``a2a+p2p``, which is one of the others on two ranks: it is counted only, on four."""

COUNT_HEAD = (
    *("", "ranks", "heads, on keys'", "sent MiB", "of theory", "to the byte"),
    *("peak MiB", "of formula", f"±{PEAK_TOLERANCE:.0%}"),
)


class Pair(NamedTuple):
    """Times of one backend on two ranks and of one process, and what autograd saves on each."""

    shared_s: list[float]
    alone_s: list[float]
    saved: int
    saved_alone: int


class Rows(NamedTuple):
    """Times of a row of several documents and of a row of one."""

    several_s: list[float]
    one_s: list[float]


def _inputs(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, heads, length, HEAD_SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _step(
    attention: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    sequence: SequenceInfo | None = None,
) -> int:
    """Run forward and backward; return the bytes that autograd has saved."""
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    q, k, v = (x.detach().requires_grad_() for x in inputs)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attention(q, k, v, sequence or SequenceInfo(), SCALE)
    out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]
    return sum(saved.values())


def _measure_pair(backend: str, length: int, rounds: int) -> Pair:
    context = ParallelContext(ParallelLayout(context_parallel_size=2))
    alone, shared = LocalAttention(), BACKENDS[backend](context)
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


def eight_documents(length: int) -> Documents:
    """Return documents of a row, of about the same length, that begin and end within the chunks of
    the ranks.
    """
    each, shift = length // NUM_DOCUMENTS, length // NUM_DOCUMENTS // 8
    inner = (number * each - shift for number in range(1, NUM_DOCUMENTS))
    return Documents(((0, *inner, length),))


def _measure_documents(num_ranks: int, length: int, rounds: int) -> Rows:
    context = ParallelContext(ParallelLayout(context_parallel_size=num_ranks))
    attention = LocalAttention() if num_ranks == 1 else BACKENDS["p2p"](context)
    local = [SequencePart(context.cp.rank, num_ranks).split(x, 2) for x in _inputs(length)]
    found = Rows([], [])
    sequences = (SequenceInfo(documents=eight_documents(length)), SequenceInfo())
    for _ in range(rounds + 1):
        for times, sequence in zip(found, sequences, strict=True):
            _barrier(num_ranks)
            start = time.perf_counter()
            _step(attention, local, sequence)
            _barrier(num_ranks)
            times.append(time.perf_counter() - start)
    return Rows(found.several_s[1:], found.one_s[1:])


def _barrier(num_ranks: int) -> None:
    if num_ranks > 1:
        dist.barrier()


def _measure_host(length: int, rounds: int) -> tuple[list[float], list[float]]:
    """Return seconds of the blocks of rank 0 of 4 with their merges, and of the kernels alone."""
    kernel, part = kernel_for(torch.device("cpu")), SequencePart(0, 4)
    q, k, v = (part.split(x, 2) for x in _inputs(length))
    queries = part.spans(length)
    steps = [
        visible_blocks(queries, SequencePart(rank, 4).spans(length), SequenceInfo())
        for rank in range(4)
    ]
    visible = [block for step in steps for block in step]

    def forward(*, merges: bool) -> None:
        merged = Merged(q, Sharing(ALONE, SequenceInfo(), SCALE))
        for block in visible:
            at, to = block.queries, block.keys
            output = kernel.forward(Inputs(q[:, :, at], k[:, :, to], v[:, :, to]), block, SCALE)
            if merges:
                merged.add(block, output)

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

    ring: list[float] = []
    kernels: list[float] = []
    for _ in range(rounds + 1):
        for times, merges in ((ring, True), (kernels, False)):
            start = time.perf_counter()
            forward(merges=merges)
            backward(merges=merges)
            times.append(time.perf_counter() - start)
    return ring[1:], kernels[1:]


def cases(length: int) -> Iterator[Case]:
    """Yield what is counted: as it is timed, and in bf16 with heads that share keys."""
    for groups, dtype in ((GROUPS, torch.float32), (GROUPS // 4, torch.bfloat16)):
        for backend in BACKENDS:
            has_levels = backend == "a2a+p2p"
            num_ranks, levels = (4, LEVELS) if has_levels else (2, None)
            yield Case(backend, num_ranks, HEADS, groups, dtype, length, levels, HEAD_SIZE)


def _pair_row(name: str, found: Pair) -> list[str]:
    ratio = ratio_of_medians(found.alone_s, found.shared_s)
    part = found.saved / found.saved_alone
    return [
        name,
        f"{statistics.median(found.shared_s) * 1e3:.0f}",
        f"{statistics.median(found.alone_s) * 1e3:.0f}",
        str(ratio),
        verdict(ratio.meets(SPEEDUP_GOAL)),
        f"{part:.3f}",
        verdict(abs(part / 0.5 - 1) <= SAVED_TOLERANCE),
    ]


def _count_row(case: Case, found: Counted) -> list[str]:
    sent_bytes, expected = sum(found.sent_bytes.values()), expected_sent_bytes(case)
    peak = found.peak_bytes / expected_peak_bytes(case)
    return [
        case.backend,
        str(case.num_ranks),
        f"{case.heads} on {case.groups}, {str(case.dtype).removeprefix('torch.')}",
        f"{sent_bytes / 2**20:.2f}",
        f"{sent_bytes / expected:.3f}",
        verdict(sent_bytes == expected),
        f"{found.peak_bytes / 2**20:.2f}",
        f"{peak:.3f}",
        verdict(abs(peak - 1) <= PEAK_TOLERANCE),
    ]


def _documents_row(name: str, found: Rows) -> list[str]:
    ratio = ratio_of_medians(found.several_s, found.one_s)
    return [
        name,
        f"{statistics.median(found.several_s) * 1e3:.0f}",
        f"{statistics.median(found.one_s) * 1e3:.0f}",
        str(ratio),
        verdict(ratio.keeps(DOCUMENTS_LIMIT)),
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["", *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)), ""]


def _times(length: int, pairs: dict[str, Pair], host: Ratio, rows: dict[str, Rows]) -> list[str]:
    squares = sum(len(span) ** 2 for _, span in eight_documents(length).spans()) / length**2
    return [
        *_table(
            ["", "2 ranks ms", "one ms", "speedup", f"goal {SPEEDUP_GOAL}", "saved", "goal 1/2"],
            [_pair_row(name, found) for name, found in pairs.items()],
        ),
        f"Ring of 4, host: {host} times its kernels, limit {HOST_LIMIT} "
        f"{verdict(host.keeps(HOST_LIMIT))}.",
        "",
        f"A row of {NUM_DOCUMENTS} documents, whose squares add up to {squares:.3f} of the row's:",
        *_table(
            ["", f"{NUM_DOCUMENTS} documents ms", "1 document ms", "ratio", "limit 1/4"],
            [_documents_row(name, found) for name, found in rows.items()],
        ),
    ]


def measure(length: int, rounds: int, folder: Path | None) -> str:
    """Measure everything and return the page.

    Args:
        length: Positions of a row.
        rounds: How often each is timed.
        folder: Where the page is kept; None: nowhere.
    """
    facts: dict[str, Any] = machine.describe()
    timed = [backend for backend in BACKENDS if backend != "a2a+p2p"]
    pairs = {
        backend: run(2, _measure_pair, backend, length, rounds, limit_s=600.0)[0]
        for backend in timed
    }
    ring, kernels = run(1, _measure_host, length, rounds, limit_s=600.0)[0]
    rows = {
        name: run(num_ranks, _measure_documents, num_ranks, length, rounds, limit_s=600.0)[0]
        for name, num_ranks in (("one process", 1), ("2 ranks, p2p", 2))
    }
    counted = list(zip(cases(length), count(list(cases(length))), strict=True))
    facts["load_average_at_end"] = machine.describe()["load_average"]
    page = "\n".join(
        [
            f"# Attention over shared sequences, {facts['date'][:10]}",
            "",
            f"{machine.headline(facts)}.",
            "",
            f"Sequence {length}, {HEADS} heads of {HEAD_SIZE}, batch {BATCH}, {rounds} rounds in "
            "turns, one thread a rank; 95 % bootstrap intervals.",
            *_times(length, pairs, ratio_of_medians(ring, kernels), rows),
            "Counted on rank 0 in one forward and backward: bytes handed to the network, and live "
            "bytes at the peak, without what kernels and collectives allocate for themselves:",
            *_table(
                COUNT_HEAD,
                [_count_row(case, found) for case, found in counted],
            ),
        ]
    )
    if folder is not None:
        numbers = {
            "pairs": {name: found._asdict() for name, found in pairs.items()},
            "host": {"ring_s": ring, "kernels_s": kernels},
            "documents": {name: found._asdict() for name, found in rows.items()},
            "counts": [{"case": str(case), **found._asdict()} for case, found in counted],
        }
        machine.keep(folder, "context_cpu", facts, page, numbers)
    return page


def main() -> None:
    """Measure, print the page, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    if parser.parse_args().quick:
        print(measure(256, 2, None))
    else:
        print(measure(4096, 15, machine.RESULTS))


if __name__ == "__main__":
    main()
