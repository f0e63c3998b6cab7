"""Training speed of every layout, compared with plain Lightning on the same model.

    python -m benchmarks.bench_step          # 15 rounds, 10 minutes; writes results/
    python -m benchmarks.bench_step --quick  # seconds, a tiny model: does it run?

All variants are set up at once and train in turn, a step each (``benchmarks.teams``). Two medians
are compared: rank 0's processor seconds, which hardly depend on other programs on the machine, and
the wall time of the slowest rank. The *host* time of a layer is its processor time when there is
almost nothing to compute: the difference between a deep and a shallow model of tiny width, divided
by the layers and micro-batches of rank 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.command_line import parser_of
from benchmarks.statistics import Ratio, ratio_of_medians, verdict
from benchmarks.teams import StepTime, measure
from benchmarks.variants import GOALS, VARIANTS, Goal, Shape, Variant

TINY = Shape(hidden_size=32, num_heads=8, num_groups=4, ffn_size=64, vocab_size=64, sequence=16)
QUICK = replace(TINY, num_layers=2)
SHALLOW, DEEP = 2, 10
LOSS_TOLERANCE = 1e-4  # fp32, up to 20 optimizer steps; ranks sum in another order than one process

Steps = Mapping[str, Sequence[Sequence[StepTime]]]


@dataclass(frozen=True)
class Row:
    """Results of one variant."""

    name: str
    cpu_s: float
    """Median processor seconds of rank 0 a step."""
    wall_s: float
    """Median wall seconds of the slowest rank a step."""
    tokens_per_s: float
    host_us: float | None
    """Host time of a layer for one micro-batch, forward to optimizer step, in microseconds."""
    peak_mib: float
    """Peak memory of a rank above the imported libraries."""


@dataclass(frozen=True)
class Comparison:
    """Speed of ours relative to the peer; above 1, ours is faster."""

    goal: Goal
    cpu: Ratio
    wall: Ratio


def cpu_seconds(steps: Sequence[Sequence[StepTime]]) -> list[float]:
    """Return rank 0's processor seconds of every step."""
    return [ranks[0].cpu_s for ranks in steps]


def wall_seconds(steps: Sequence[Sequence[StepTime]]) -> list[float]:
    """Return the slowest rank's wall seconds of every step."""
    return [max(rank.wall_s for rank in ranks) for ranks in steps]


def compare(steps: Steps, goal: Goal) -> Comparison:
    """Compare two variants of one run.

    A pipeline's bubble costs wall time only, so ``ideal`` scales only that ratio.
    """
    ours, peer = steps[goal.ours], steps[goal.peer]
    wall = ratio_of_medians(wall_seconds(peer), wall_seconds(ours)).scaled(1.0 / goal.ideal)
    return Comparison(goal, ratio_of_medians(cpu_seconds(peer), cpu_seconds(ours)), wall)


def largest_loss_difference(steps: Steps) -> float:
    """Return the largest relative difference between the losses of two variants at the same
    step.
    """
    losses = [
        [statistics.fmean(rank.loss for rank in ranks) for ranks in rounds]
        for rounds in steps.values()
    ]
    return max(abs(max(at_step) / min(at_step) - 1.0) for at_step in zip(*losses, strict=True))


def host_us(
    variant: Variant, shallow: Sequence[Sequence[StepTime]], deep: Sequence[Sequence[StepTime]]
) -> float:
    """Return the host time of a layer and micro-batch in microseconds."""
    difference = statistics.median(cpu_seconds(deep)) - statistics.median(cpu_seconds(shallow))
    return difference * 1e6 / ((DEEP - SHALLOW) / variant.stages * variant.num_microbatches)


def rows(steps: Steps, shape: Shape, host: tuple[Steps, Steps] | None) -> list[Row]:
    """Return the table's rows."""
    table = []
    for name, rounds in steps.items():
        wall = statistics.median(wall_seconds(rounds))
        peak = max(rank.peak_bytes for ranks in rounds for rank in ranks)
        layer = host_us(VARIANTS[name], host[0][name], host[1][name]) if host else None
        table.append(
            Row(
                name,
                statistics.median(cpu_seconds(rounds)),
                wall,
                shape.tokens / wall,
                layer,
                peak / 2**20,
            )
        )
    return table


def markdown(
    facts: Mapping[str, Any], shape: Shape, table: Sequence[Row], comparisons: Sequence[Comparison]
) -> str:
    """Return the result as a page."""
    lines = [
        f"# Training step, {facts['date'][:10]}",
        "",
        f"{machine.headline(facts)} (the benchmark itself adds up to 4).",
        "",
        f"{shape.num_layers} layers x {shape.hidden_size}, {shape.num_heads} heads, "
        f"{shape.num_groups} query groups, ffn {shape.ffn_size}, vocabulary {shape.vocab_size}, "
        f"sequence {shape.sequence}, batch {shape.batch}, fp32, AdamW, clip 1.0, one thread a "
        f"rank. {facts['rounds']} rounds in turns; medians. Losses of all variants agree to "
        f"{facts['loss_difference']:.1e}.",
        "",
        "| variant | tokens/s | wall s | rank-0 CPU s | host µs a layer and micro-batch | peak "
        "MiB a rank |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in table:
        host = "" if row.host_us is None else f"{row.host_us:.0f}"
        lines.append(
            f"| {row.name} | {row.tokens_per_s:.0f} | {row.wall_s:.3f} | {row.cpu_s:.3f} | {host} "
            f"| {row.peak_mib:.0f} |"
        )
    return "\n".join([*lines, "", *comparison_table(comparisons), ""])


def comparison_table(comparisons: Sequence[Comparison]) -> list[str]:
    """Return the lines of a page that compare variants with their peers."""
    lines = [
        "Speed relative to the peer (above 1: ours is faster), with a 95 % bootstrap interval:",
        "",
        "| ours | peer | goal | by CPU seconds | by wall time | verdict |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for comparison in comparisons:
        goal = comparison.goal
        peer = (
            goal.peer
            if goal.ideal == 1.0
            else f"{goal.peer} x {goal.ideal:.2f} (bubble; wall only)"
        )
        wanted = "" if goal.ratio is None else f"{goal.ratio:.2f}"
        lines.append(
            f"| {goal.ours} | {peer} | {wanted} | {comparison.cpu} | {comparison.wall} | "
            f"{judgment(comparison)} |"
        )
    return lines


def judgment(comparison: Comparison) -> str:
    """Return by which measures the goal is met."""
    goal = comparison.goal
    if goal.ratio is None:
        return "for information"
    measures = (
        {"CPU": comparison.cpu, "wall": comparison.wall}
        if goal.ideal == 1.0
        else {"wall": comparison.wall}
    )
    return "; ".join(
        f"{name} {verdict(ratio.meets(goal.ratio))}" for name, ratio in measures.items()
    )


def run(
    names: Sequence[str], shape: Shape, num_rounds: int, *, with_host: bool, folder: Path
) -> str:
    """Measure, write a JSON and a Markdown file into ``folder``, and return the page.

    Raises:
        RuntimeError: If the losses differ, so that the times compare nothing.
    """
    facts, variants = machine.describe(), [VARIANTS[name] for name in names]
    host = None
    if with_host:
        shallow, deep = (replace(TINY, num_layers=layers) for layers in (SHALLOW, DEEP))
        host = (
            measure(variants, shallow, num_rounds, num_dropped=3),
            measure(variants, deep, num_rounds, num_dropped=3),
        )
    steps = measure(variants, shape, num_rounds)
    facts |= {"rounds": num_rounds, "loss_difference": largest_loss_difference(steps)}
    facts["load_average_at_end"] = machine.describe()["load_average"]
    comparisons = [compare(steps, goal) for goal in GOALS if {goal.ours, goal.peer} <= set(names)]
    page = markdown(facts, shape, rows(steps, shape, host), comparisons)
    kept: dict[str, Any] = {
        "shape": asdict(shape),
        "comparisons": [asdict(comparison) for comparison in comparisons],
        "steps": {
            name: [[rank._asdict() for rank in ranks] for ranks in rounds]
            for name, rounds in steps.items()
        },
    }
    if host:
        kept["host_cpu_s"] = {
            str(layers): {name: cpu_seconds(rounds) for name, rounds in times.items()}
            for layers, times in zip((SHALLOW, DEEP), host, strict=True)
        }
    file = machine.keep(folder, "step_cpu", facts, page, kept)
    if facts["loss_difference"] > LOSS_TOLERANCE:
        raise RuntimeError(
            f"the losses of the variants differ by {facts['loss_difference']:.1e}, more than "
            f"{LOSS_TOLERANCE}: they did not do the same work, and {file} compares nothing."
        )
    return page


def main() -> None:
    """Read the command line and run."""
    parser = parser_of(__doc__)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    options = parser.parse_args()
    shape, rounds = (QUICK, 2) if options.quick else (Shape(), options.rounds)
    print(run(options.variants, shape, rounds, with_host=not options.quick, folder=options.results))


if __name__ == "__main__":
    main()
