"""Pipeline schedules with stages that sleep, compared with the formula and with torch's own
pipelining.

    python -m benchmarks.bench_pipeline          # 2, 4 and 8 ranks, 7 minutes; writes results/
    python -m benchmarks.bench_pipeline --quick  # half a minute, 2 ranks, two rounds: does it run?

Both engines run a schedule on the same processes, a step each in turn; every schedule has processes
of its own, since each gloo process group has a thread that wakes a hundred times a second. A step
lasts from a barrier to the end of the slowest rank. *Messages alone* is the same step with stages
that take no time; *host* is the processor time of a rank's main thread in it, for each action, less
that of the same stages without any engine; its goal applies where every rank has a core of its own.
Peak memory is measured separately, in fresh processes with messages of 4 MiB: the growth of a
rank's resident memory since before its first step.
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import machine
from benchmarks.command_line import parser_of
from benchmarks.pipeline_stages import ENGINES, SCHEDULES, Case, bare_step
from benchmarks.statistics import ratio_of_medians, verdict

TIMEOUT_S = 600.0
SMALL, LARGE = 256, 2**20  # elements of a message
GOALS: Mapping[str, float] = {"1f1b": 1.05, "interleaved": 1.05, "zb-h1": 1.08, "zbv": 1.08}
"""Limit of a step's time, as a multiple of the formula."""
HOST_GOAL_US = 100.0
"""Limit of the engine's processor time for an action, where every rank has a core of its own."""
_SET_TIMER_SLACK = 29  # PR_SET_TIMERSLACK of linux/prctl.h, in ns

Engine = Callable[[Case, int], Callable[[], None]]


def _measure_times(case: Case, rounds: int, engines: Mapping[str, Engine]) -> dict[str, Any]:
    """Run a case with all engines in turn; return wall and main-thread processor seconds of this
    rank.
    """
    rank = dist.get_rank()
    steps = {f"{case.schedule}/{name}": make(case, rank) for name, make in engines.items()}
    walls: dict[str, list[float]] = {name: [] for name in steps}
    hosts: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(-2, rounds):  # two rounds to warm up
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            wall, host = time.perf_counter(), time.thread_time()
            steps[name]()
            if number >= 0:
                walls[name].append(time.perf_counter() - wall)
                hosts[name].append(time.thread_time() - host)
    return {"wall": walls, "host": hosts}


def _measure_memory(case: Case, engine: str) -> float:
    """Return the peak growth of this rank's resident memory during its first three steps, in
    MiB.
    """
    step = ENGINES[engine](case, dist.get_rank())
    dist.barrier()
    before = machine.status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    for _ in range(3):
        step()
    return (machine.status_bytes("VmHWM") - before) / 2**20


def _rank_main(
    body: Callable[..., Any],
    rank: int,
    size: int,
    store: str,
    pipe: Connection,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    # Linux lets sleeps last 50 us longer otherwise.
    ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)
    try:
        file_store = dist.FileStore(store, size)
        timeout = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group(
            "gloo", store=file_store, rank=rank, world_size=size, timeout=timeout
        )
        pipe.send((True, body(*args)))
    except Exception:
        pipe.send((False, traceback.format_exc()))
    os._exit(0)  # torch's engine leaves threads behind


def on_ranks(size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the results of ``body(*args)`` on ``size`` new processes.

    Raises:
        RuntimeError: With the traceback of a rank that failed.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.pipeline_stages"])
    with tempfile.TemporaryDirectory() as folder:
        pipes = []
        processes = []
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(body, rank, size, f"{folder}/store", sender, args)
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        answers = [
            pipe.recv() if pipe.poll(TIMEOUT_S) else (False, f"nothing in {TIMEOUT_S} s")
            for pipe in pipes
        ]
        for process in processes:
            process.kill()
            process.join()
    failures = [
        f"rank {rank}:\n{answer}"
        for rank, (succeeded, answer) in enumerate(answers)
        if not succeeded
    ]
    if failures:
        raise RuntimeError("\n".join(failures))
    return [answer for _, answer in answers]


def _slowest(cases: Sequence[Sequence[Mapping[str, Any]]], kind: str) -> dict[str, list[float]]:
    return {
        name: [max(values) for values in zip(*(rank[kind][name] for rank in ranks), strict=True)]
        for ranks in cases
        for name in ranks[0][kind]
    }


def measure(ranks: int, microbatches: int, unit_s: float, rounds: int) -> dict[str, Any]:
    """Return all measurements of one number of ranks: lists by ``schedule/engine``."""
    timed = [Case(schedule, ranks, microbatches, unit_s, SMALL) for schedule in SCHEDULES]
    alone = [case._replace(unit_s=0.0) for case in timed]
    steps = [on_ranks(ranks, _measure_times, case, rounds, ENGINES) for case in timed]
    messages = [
        on_ranks(ranks, _measure_times, case, rounds, {**ENGINES, "bare": bare_step})
        for case in alone
    ]
    memory = {
        f"{case.schedule}/{engine}": max(
            on_ranks(ranks, _measure_memory, case._replace(unit_s=0.0, numel=LARGE), engine)
        )
        for case in timed
        for engine in ENGINES
    }
    return {
        "ranks": ranks,
        "microbatches": microbatches,
        "unit_s": unit_s,
        "step_s": _slowest(steps, "wall"),
        "messages_s": _slowest(messages, "wall"),
        "host_s": _slowest(messages, "host"),
        "peak_mib": memory,
    }


def rows(result: Mapping[str, Any]) -> list[str]:
    """Return the table's lines of one number of ranks."""
    lines = []
    for schedule, chunks in SCHEDULES.items():
        case = Case(schedule, result["ranks"], result["microbatches"], result["unit_s"], SMALL)
        ours, torchs, bare = (f"{schedule}/{engine}" for engine in ("ours", "torch", "bare"))
        against_formula = ratio_of_medians(
            result["step_s"][ours], [case.ideal_s] * len(result["step_s"][ours])
        )
        against_torch = ratio_of_medians(result["step_s"][torchs], result["step_s"][ours])
        actions = case.microbatches * chunks * (3 if case.splits_backward else 2)
        host = {
            name: statistics.median(result["host_s"][name]) / actions * 1e6
            for name in (ours, torchs, bare)
        }
        alone = {
            name: statistics.median(result["messages_s"][name]) * 1e3 for name in (ours, torchs)
        }
        engine_us = {name: host[name] - host[bare] for name in (ours, torchs)}
        kept = verdict(against_formula.keeps(GOALS[schedule]))
        if case.ranks <= (os.cpu_count() or 1):
            host_kept = verdict(engine_us[ours] < HOST_GOAL_US)
            host_goal = f", goal {HOST_GOAL_US:.0f} {host_kept}"
        else:
            host_goal = ""
        cells = [
            f"{case.ranks} x {case.microbatches}",
            schedule,
            f"{case.ideal_s * 1e3:.0f}",
            f"{statistics.median(result['step_s'][ours]) * 1e3:.0f}",
            f"{statistics.median(result['step_s'][torchs]) * 1e3:.0f}",
            f"{against_formula}",
            f"{GOALS[schedule]:.2f} {kept}",
            f"{against_torch}",
            f"{alone[ours]:.1f} / {alone[torchs]:.1f}",
            f"{engine_us[ours]:.0f} / {engine_us[torchs]:.0f}{host_goal}",
            f"{result['peak_mib'][ours]:.0f} / {result['peak_mib'][torchs]:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def markdown(facts: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    """Return the result as a page."""
    header = (
        "ranks x micro-batches",
        "schedule",
        "formula ms",
        "ours ms",
        "torch ms",
        "ours / formula",
        "goal",
        "torch / ours",
        "messages alone ms, ours / torch",
        "host µs an action, ours / torch",
        "peak MiB, ours / torch",
    )
    lines = [
        f"# Pipeline schedules, {facts['date'][:10]}",
        "",
        f"{machine.headline(facts)}.",
        "",
        f"Stages sleep {results[0]['unit_s'] * 1e3:.0f} ms for a forward, an input gradient and a "
        f"weight gradient; {facts['rounds']} rounds in turns; medians of the slowest rank, 95 % "
        "bootstrap intervals.",
        "",
        f"| {' | '.join(header)} |",
        "| --- " * len(header) + "|",
        *(line for result in results for line in rows(result)),
    ]
    return "\n".join([*lines, ""])


def run(sizes: Sequence[int], unit_s: float, rounds: int, folder: Path) -> str:
    """Measure, write a JSON and a Markdown file into ``folder``, and return the page."""
    facts = machine.describe()
    results = [measure(ranks, 2 * ranks, unit_s, rounds) for ranks in sizes]
    facts |= {"rounds": rounds, "load_average_at_end": machine.describe()["load_average"]}
    page = markdown(facts, results)
    machine.keep(folder, "pipeline_cpu", facts, page, {"results": results})
    return page


def main() -> None:
    """Read the command line and run."""
    parser = parser_of(__doc__, quick="2 ranks, 5 ms units and two rounds")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument(
        "--unit-ms", type=float, default=20.0, help="time of a forward through all stages of a rank"
    )
    options = parser.parse_args()
    sizes, unit_ms, rounds = (
        ([2], 5.0, 2) if options.quick else (options.ranks, options.unit_ms, options.rounds)
    )
    # So that freed activations leave the resident memory.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1048576")
    print(run(sizes, unit_ms / 1e3, rounds, options.results))


if __name__ == "__main__":
    main()
