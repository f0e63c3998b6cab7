"""The command ``megatron-lightning schedule``: table, time, bubble and memory of a schedule before
the run. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline.schedules import SCHEDULES, make_schedule, resolve
from megatron_lightning.pipeline.schedules.actions import Action, Kind, Placement, Schedule
from megatron_lightning.pipeline.schedules.formulas import expected
from megatron_lightning.pipeline.schedules.picture import Panel, chrome_trace, draw, svg, write_png
from megatron_lightning.pipeline.schedules.simulate import Costs, Simulation, simulate
from megatron_lightning.pipeline.schedules.trace import Trace, read_trace


def describe_schedule(
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    chunks: int = 1,
    schedule: str = "auto",
    microbatch_group_size: int | None = None,
    forward: Sequence[float] = (1.0,),
    input_gradient: Sequence[float] = (1.0,),
    weight_gradient: Sequence[float] = (1.0,),
    communication: float = 0.0,
    compare: bool = False,
    trace: str | None = None,
    output: str | None = None,
) -> str:
    """Show a pipeline schedule: table, bubble, memory, and with ``output`` a picture and a trace.

    Args:
        ranks: Pipeline ranks.
        microbatches: Micro-batches of a pipeline run.
        chunks: Model chunks on each pipeline rank.
        schedule: "gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "auto", a CSV file, or the class
            path of a function.
        microbatch_group_size: Micro-batches that pass a chunk in one go, for the interleaved
            schedule.
        forward: Time of a micro-batch's forward on the layers of a pipeline rank, split over the
            rank's chunks. Several numbers: on every stage.
        input_gradient: Time of the gradient of the input, likewise.
        weight_gradient: Time of the gradient of the weights, likewise.
        communication: Time of a message between two ranks.
        compare: Show all schedules side by side, with your own schedule. ``interleaved`` with
            ``chunks`` (or 2).
        trace: Directory of an executed timeline, to compare with the simulated timeline. No other
            option is needed then.
        output: Directory for the picture (SVG and PNG) and the Chrome trace. Without a directory
            nothing is written.
    """
    if trace is not None:
        return _executed(read_trace(trace), trace, output)
    if ranks is None or microbatches is None:
        raise ConfigError(
            f"ranks is {ranks} and microbatches is {microbatches}; a schedule is for numbers of "
            "both. Set --ranks and --microbatches, or --trace."
        )
    if min(ranks, microbatches, chunks) < 1:
        raise ConfigError(
            f"ranks={ranks}, microbatches={microbatches} and chunks={chunks}: set each to 1 or "
            "more."
        )

    costs = partial(_costs, (forward, input_gradient, weight_gradient), communication)
    if compare:
        tables = _tables(ranks, microbatches, chunks, schedule, microbatch_group_size)
        return _compared(
            tables, [costs(table.placement) for table in tables], microbatch_group_size, output
        )
    choice = resolve(
        schedule, num_ranks=ranks, num_chunks=chunks, microbatch_group_size=microbatch_group_size
    )
    table = choice.table(microbatches)
    head = f"schedule {choice}: {_sizes(table)}"
    return "\n".join(
        [head, "", *_one(table, costs(table.placement), microbatch_group_size, output)]
    )


def _tables(
    num_ranks: int, num_microbatches: int, num_chunks: int, own: str, group_size: int | None
) -> list[Schedule]:
    """Return the tables of all schedules, and of the user's own."""
    chunks = dict.fromkeys(SCHEDULES, 1) | {"interleaved": max(num_chunks, 2), "zbv": 2}
    if own not in ("auto", *SCHEDULES):
        chunks[own] = num_chunks
    return [
        make_schedule(
            name,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            num_chunks=count,
            microbatch_group_size=group_size if name == "interleaved" else None,
        )
        for name, count in chunks.items()
    ]


def _costs(times: Sequence[Sequence[float]], communication: float, placement: Placement) -> Costs:
    """Return costs from the times of F, I and W: a number for the layers of a pipeline rank, or a
    number for every stage.
    """
    share = placement.num_ranks / placement.num_stages
    forward, input_gradient, weight_gradient = (
        numbers[0] * share if len(numbers) == 1 else tuple(numbers) for numbers in times
    )
    return Costs(
        forward=forward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        communication=communication,
        activation=share,
    )


def _one(
    schedule: Schedule, costs: Costs, group_size: int | None, output: str | None
) -> Iterable[str]:
    simulation, formula = simulate(schedule, costs), expected(schedule, costs, group_size)
    for pp_rank, row in enumerate(schedule.actions):
        yield f"pp rank {pp_rank}: {' '.join(map(str, row))}"
    rows = [
        ["", "simulated"],
        ["step time", _number(simulation.step_time)],
        ["bubble", _percent(simulation.bubble)],
    ]
    shares = [_number(peak) for peak in simulation.peak_activations]
    rows += [
        [f"activations held by pp rank {pp_rank}", share] for pp_rank, share in enumerate(shares)
    ]
    if formula is not None:
        # The formula counts activations of single stages, and the simulation their memory: the
        # memory of one stage converts.
        share = costs.activations(schedule.placement.num_stages)[0]
        columns = [formula.step_time, None, *(peak * share for peak in formula.peak_in_flight)]
        formula_texts = [
            _number(value)
            if value is not None
            else _percent(_idle(schedule, simulation, formula.step_time))
            for value in columns
        ]
        rows = [[*row, value] for row, value in zip(rows, ["formula", *formula_texts], strict=True)]
        # The written formula stands beside the step time, in the first row behind the head.
        rows[1].append(formula.formula)
    yield from ("", *_aligned(rows))
    yield "Activations are counted in micro-batches on all layers of one rank."
    if formula is None:
        yield "There is no formula for this schedule with these numbers."
    panel = Panel(
        f"{schedule.name}: {_sizes(schedule)}, bubble {_percent(simulation.bubble)}",
        schedule.placement,
        simulation.spans,
    )
    chunks = schedule.placement.num_stages // schedule.placement.num_ranks
    sizes = f"p{schedule.placement.num_ranks}-c{chunks}-m{schedule.num_microbatches}"
    yield from _write([panel], output, f"schedule-{schedule.name}-{sizes}")


def _compared(
    tables: Sequence[Schedule], costs: Sequence[Costs], group_size: int | None, output: str | None
) -> str:
    simulations = [simulate(table, cost) for table, cost in zip(tables, costs, strict=True)]
    rows = [
        ["schedule", "chunks", "step time", "bubble", "by formula", "most activations", "messages"]
    ]
    panels = []
    for table, cost, simulation in sorted(
        zip(tables, costs, simulations, strict=True), key=lambda entry: entry[2].step_time
    ):
        formula = expected(table, cost, group_size)
        placement = table.placement
        hops = sum(first != second for first, second in pairwise(placement.pp_ranks))
        rows.append(
            [
                table.name,
                str(placement.num_stages // placement.num_ranks),
                _number(simulation.step_time),
                _percent(simulation.bubble),
                "-" if formula is None else _percent(_idle(table, simulation, formula.step_time)),
                _number(max(simulation.peak_activations)),
                str(2 * table.num_microbatches * hops),  # outputs forward, gradients backward
            ]
        )
        panels.append(
            Panel(
                f"{table.name}: bubble {_percent(simulation.bubble)}", placement, simulation.spans
            )
        )
    num_ranks, num_microbatches = len(tables[0].actions), tables[0].num_microbatches
    files = _write(panels, output, f"schedules-p{num_ranks}-m{num_microbatches}")
    head = (
        f"{num_ranks} pipeline ranks, {num_microbatches} micro-batches; activations in "
        "micro-batches on all layers of one rank"
    )
    return "\n".join([head, "", *_aligned(rows), *files])


def _executed(trace: Trace, source: str, output: str | None) -> str:
    """Compare an executed run with the simulation of the run's table under the mean times of the
    actions.
    """
    schedule, costs = trace.schedule, trace.costs()
    simulation = simulate(schedule, costs)
    step_times = (max(end for _, end in trace.spans.values()), simulation.step_time)
    both_spans = (trace.spans, simulation.spans)

    # Both kinds are divided by their own step time, so that the shares compare though the clocks
    # differ.
    def idle(row: Iterable[Action], count: int = 1) -> list[str]:
        actions = tuple(row)
        work = [
            sum(spans[action][1] - spans[action][0] for action in actions) for spans in both_spans
        ]
        return [
            _percent(1 - busy / (total * count))
            for busy, total in zip(work, step_times, strict=True)
        ]

    bubbles = idle(trace.spans, len(schedule.actions))
    rows = [
        ["", "executed", "simulated"],
        ["step time, ms", *(_number(1e3 * time) for time in step_times)],
        ["bubble", *bubbles],
    ]
    for pp_rank, row in enumerate(schedule.actions):
        rows.append([f"idle time of pp rank {pp_rank} (rank {trace.ranks[pp_rank]})", *idle(row)])
    durations = costs.durations(schedule.placement.num_stages)
    kinds = [kind for kind in Kind if any(action.kind is kind for action in trace.spans)]
    means = [["mean ms of", *(kind.value for kind in kinds)]]
    for stage in range(schedule.placement.num_stages):
        means.append([f"stage {stage}", *(_number(1e3 * durations[kind][stage]) for kind in kinds)])
    panels = []
    names = ("executed", "simulated with the same times")
    for name, time, bubble, spans in zip(names, step_times, bubbles, both_spans, strict=True):
        spans_ms = {action: (1e3 * start, 1e3 * end) for action, (start, end) in spans.items()}
        panels.append(
            Panel(f"{name}: {1e3 * time:.1f} ms, bubble {bubble}", schedule.placement, spans_ms)
        )
    head = (
        f"{source}: {_sizes(schedule)}; the simulation has no messages and no host work between "
        "the actions"
    )
    return "\n".join(
        [
            head,
            "",
            *_aligned(rows),
            "",
            *_aligned(means),
            *_write(panels, output, "executed", " ms"),
        ]
    )


def _sizes(schedule: Schedule) -> str:
    placement = schedule.placement
    chunks = placement.num_stages // placement.num_ranks
    return (
        f"{placement.num_ranks} pipeline ranks x {chunks} {'chunk' if chunks == 1 else 'chunks'}, "
        f"{schedule.num_microbatches} micro-batches"
    )


def _idle(schedule: Schedule, simulation: Simulation, step_time: float) -> float:
    work = sum(end - start for start, end in simulation.spans.values())
    return 1 - work / (step_time * len(schedule.actions))


def _write(panels: Sequence[Panel], folder: str | None, name: str, unit: str = "") -> Sequence[str]:
    """Write picture and Chrome trace to ``folder``, if given. Return the lines with the names of
    the files.
    """
    if folder is None:
        return []
    scene = draw(panels, unit)
    paths = [Path(folder, f"{name}{suffix}") for suffix in (".svg", ".png", ".trace.json")]
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        paths[0].write_text(svg(scene), encoding="utf-8")
        write_png(scene, paths[1])
        paths[2].write_text(chrome_trace(panels), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"output is {folder}, where the picture cannot be written: {error}. Set it to a folder."
        ) from error
    return ["", f"written: {', '.join(map(str, paths))}"]


def _number(value: float) -> str:
    return f"{value:.6g}"


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Return the rows as lines, the first column aligned left, the other columns right."""
    widths = [
        max(len(row[column]) for row in rows if column < len(row))
        for column in range(max(map(len, rows)))
    ]
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=False)),
        ]
        yield "  ".join(cells).rstrip()
