"""Data parallelism: bytes and memory compared with theory, host and step time compared with torch's
DDP and FSDP2.

    python -m benchmarks.bench_data_parallel          # 15 rounds, 10 minutes; writes results/
    python -m benchmarks.bench_data_parallel --quick  # a minute, a tiny model: does it run?

Host time is the processor time of the training thread that one more layer costs in a step (forward,
backward, reduction, clipping, optimizer) when there is almost nothing to compute; its peer is the
same layer on one device without any strategy. Step times are measured in turn
(``benchmarks.teams``): medians, and ratios with a bootstrap interval.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.bench_step import (
    DEEP,
    QUICK,
    SHALLOW,
    TINY,
    Steps,
    largest_loss_difference,
    wall_seconds,
)
from benchmarks.command_line import parser_of
from benchmarks.data_parallel_counts import Count, count
from benchmarks.statistics import Ratio, ratio_of_medians, verdict
from benchmarks.teams import measure
from benchmarks.variants import VARIANTS, Shape

PEERS = ("lightning-ddp2", "lightning-fsdp2")
OURS = {"dp2": PEERS, "dp2-zero1": PEERS, "dp2-fsdp": PEERS[1:]}
"""Peers of each variant: ``fsdp`` has the hooks of torch's FSDP2, and therefore its host time."""
PLAIN = "lightning-single"
MOST_HOST_TIME = 1.2
"""Limit, as a multiple of the host time of a layer on one device."""
COUNTED = replace(Shape(), num_layers=4, vocab_size=512, sequence=16)


@dataclass(frozen=True)
class Result:
    """All measurements of a run."""

    facts: Mapping[str, Any]
    counts: Sequence[Count]
    host_us: Mapping[str, float]
    """Host time of a layer and step by variant."""
    host_ratio: Mapping[str, Ratio]
    """The same relative to one device."""
    wall_s: Mapping[str, float]
    speed: Mapping[str, Mapping[str, Ratio]]
    """Ours -> peer -> how many times faster ours is by wall time."""


def layer_seconds(shallow: Steps, deep: Steps, name: str) -> list[float]:
    """Return the processor seconds of a layer on rank 0's training thread, by round."""
    pairs = zip(shallow[name], deep[name], strict=True)
    return [(more[0].host_s - less[0].host_s) / (DEEP - SHALLOW) for less, more in pairs]


def markdown(result: Result, shape: Shape) -> str:
    """Return the result as a page."""
    facts = result.facts
    lines = [
        f"# Data parallelism, {facts['date'][:10]}",
        "",
        f"{machine.headline(facts)}. {facts['rounds']} rounds in turns; losses of all variants "
        f"agree to {facts['loss_difference']:.1e}.",
        "",
        "Counted in one step of 3 micro-batches, bf16 parameters, AdamW:",
        "",
        "| mode | ranks | sent, bytes a weight | formula | to the byte | padding | kept, bytes a "
        "weight | formula | ±5 % |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for item in result.counts:
        within = _yes(item.keeps_what_it_should)
        sent, theory = (
            sum(which.values()) / item.num_parameters for which in (item.sent, item.theory)
        )
        lines.append(
            f"| {item.mode} | {item.num_ranks} | {sent:.4f} | {theory:.4f} | "
            f"{_yes(item.sends_what_it_should)} | {item.padding:.2%} | "
            f"{item.bytes_a_parameter:.3f} | {item.expected_bytes:.3f} | {within} |"
        )
    lines += [
        "",
        "Host time of a layer and step, and relative to one device without a strategy (at most "
        "1.2 is the goal):",
        "",
    ]
    lines += ["| variant | µs | ratio | goal |", "| --- | --- | --- | --- |"]
    for name, value in result.host_us.items():
        ratio = result.host_ratio.get(name)
        goal = (
            ""
            if OURS.get(name) != PEERS or ratio is None
            else "met"
            if ratio.keeps(MOST_HOST_TIME)
            else "not met"
        )
        lines.append(f"| {name} | {value * 1e6:.0f} | {ratio or ''} | {goal} |")
    lines += [
        "",
        f"Step of {shape.num_layers} layers x {shape.hidden_size}, sequence {shape.sequence}, "
        f"batch {shape.batch}, fp32, two ranks. Speed relative to the peer (above 1: ours is "
        "faster), 95 % interval; the goal is not to be slower:",
        "",
        "| variant | wall s | " + " | ".join(f"beside {peer}" for peer in PEERS) + " |",
        "| --- | --- | --- | --- |",
    ]
    for name, wall in result.wall_s.items():
        ratios = result.speed.get(name, {})
        cells = [
            f"{ratios[p]}, {verdict(ratios[p].meets(1.0))}" if p in ratios else "" for p in PEERS
        ]
        lines.append(f"| {name} | {wall:.3f} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def run(shape: Shape, num_rounds: int, folder: Path, ranks: Sequence[int] = (1, 2, 4)) -> str:
    """Measure, write a JSON and a Markdown file into ``folder``, and return the page."""
    facts = machine.describe()
    counts = [
        count(mode, size, COUNTED.config)
        for mode in ("ddp", "zero1")
        for size in ranks
        if mode == "ddp" or size > 1
    ]
    names = (*OURS, *PEERS, PLAIN)
    shallow, deep = (
        measure(
            [VARIANTS[name] for name in names],
            replace(TINY, num_layers=layers),
            num_rounds,
            num_dropped=3,
        )
        for layers in (SHALLOW, DEEP)
    )
    steps = measure([VARIANTS[name] for name in (*OURS, *PEERS)], shape, num_rounds)
    facts |= {"rounds": num_rounds, "loss_difference": largest_loss_difference(steps)}
    facts["load_average_at_end"] = machine.describe()["load_average"]
    layers = {name: layer_seconds(shallow, deep, name) for name in names}
    walls = {name: wall_seconds(rounds) for name, rounds in steps.items()}
    result = Result(
        facts=facts,
        counts=counts,
        host_us={name: statistics.median(seconds) for name, seconds in layers.items()},
        host_ratio={
            name: ratio_of_medians(layers[name], layers[PLAIN]) for name in names if name != PLAIN
        },
        wall_s={name: statistics.median(seconds) for name, seconds in walls.items()},
        speed={
            name: {peer: ratio_of_medians(walls[peer], walls[name]) for peer in peers}
            for name, peers in OURS.items()
        },
    )
    page = markdown(result, shape)
    kept = {
        **asdict(result),
        "shape": asdict(shape),
        "wall_seconds": walls,
        "layer_host_seconds": layers,
    }
    machine.keep(folder, "data_parallel_cpu", facts, page, kept)
    return page


def main() -> None:
    """Read the command line and run."""
    options = parser_of(__doc__).parse_args()
    print(
        run(
            QUICK if options.quick else Shape(),
            2 if options.quick else options.rounds,
            options.results,
        )
    )


if __name__ == "__main__":
    main()
