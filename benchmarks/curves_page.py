"""CSV, picture and tables of ``docs/convergence.md``, from the kept curves."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from html import escape
from itertools import product, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.curves import PLANS, Contract, kept
from benchmarks.optimizers import write

PAGE = machine.ROOT / "docs" / "convergence.md"
PICTURE = machine.ROOT / "docs" / "convergence.svg"
WINDOW = 50
"""Steps that a loss is averaged over: training can amplify what a rounding does to single steps."""
_DIGITS = 1e-5
_COLORS = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f",
    "#bcbd22", "#17becf", "#393b79", "#637939", "#8c6d31", "#843c39", "#5254a3",
    "#31a354", "#756bb1", "#e6550d", "#636363", "#000000", "#de9ed6",
)  # fmt: skip
_KINDS = {
    "Llama": (False, ""), "Mixtral": (True, ""), "LoRA beside TRL with peft": (False, "lora"),
    "All weights beside TRL": (False, "full"),
}  # fmt: skip
"""In words -> experts, and fine-tuning."""
_NOTES: Sequence[tuple[Collection[str], str]] = (
    (("transformers",), "`transformers` runs its own model, optimizer, schedule and clipping from "
     "the same folder of weights."),
    (("megatron",), "`megatron` is Megatron-Core, unchanged, from the same weights, on a CPU that "
     "answers its calls of CUDA (`benchmarks/curves_megatron.py`)."),
    (("torchtitan",), "`torchtitan` is torchtitan's own Llama, optimizer, clipping and schedule, "
     "from the same weights. Its Trainer needs a GPU, so that the loop is ours "
     "(`benchmarks/curves_torchtitan.py`)."),
    (("rounded",), "`rounded` is one process whose first weights were changed by a rounding: a "
     "layout that is right differs about as much, and a wrong gradient far more, from the first "
     "steps on."),
    (("rounded-experts",), "`rounded-experts` is such a process with experts."),
    (("one-bf16", "tp2-sp-bf16"), "`tp2-sp-bf16` parts from one process in bf16 about as far as "
     "that process parts from itself on another machine, below."),
    (("ep2",), "Experts can amplify more than dense layers: where two scores of a router are equal "
     "but for their last digit, a token can go to another expert."),
    (("trl-lora", "lora-tp2"), "`lora-tp2` is compared with TRL's `SFTTrainer`, from factors that "
     "`peft` has drawn, and has ten times the learning rate. Read it with care: its model has "
     "random weights, so that little is learned, and one process parts from itself as much where "
     "its factors are changed by a rounding ([log](LOG.md))."),
    (("trl-full", "full-zero1"), "`full-zero1` is compared with TRL's `SFTTrainer`."),
)  # fmt: skip
"""Curves that must be kept -> how to read them."""
_WIDTH, _HEIGHT, _LEFT, _GAP = 900, 260, 60, 40


class Distance(NamedTuple):
    """Differences of two curves, relative to the loss."""

    first: float
    """At the first step, before any update."""
    equal_steps: int
    """Steps before the first whose loss differs by more than 1e-5."""
    single: float
    """Largest difference of one step."""
    averaged: float
    """Largest difference of the loss averaged over a window."""
    at: int
    """Last step of that window."""


def averages(losses: Sequence[float], window: int = WINDOW) -> list[float]:
    """Return the means of windows that follow one another; a rest is left out."""
    return [
        sum(losses[begin : begin + window]) / window
        for begin in range(0, len(losses) - window + 1, window)
    ]


def distance(found: Sequence[float], beside: Sequence[float], window: int = WINDOW) -> Distance:
    """Compare two curves of the same length."""
    single = _relative(found, beside)
    means = _relative(averages(found, window), averages(beside, window))
    farthest = max(range(len(means)), key=means.__getitem__)
    equal = next((step for step, one in enumerate(single) if one > _DIGITS), len(single))
    return Distance(single[0], equal, max(single), means[farthest], (farthest + 1) * window)


def _bounds(found: Iterable[Distance]) -> Distance:
    """Return what no pair of runs exceeds."""
    first, equal, single, averaged, at = zip(*found, strict=True)
    farthest = max(averaged)
    return Distance(max(first), min(equal), max(single), farthest, at[averaged.index(farthest)])


def pairs(
    record: Mapping[str, Any], beside: Mapping[str, Any]
) -> list[tuple[Sequence[float], Sequence[float]]]:
    """Return the losses of runs to compare: on the same machine if there are any, since processors
    round differently, else of all runs.
    """
    every = list(product(_headed(record), _headed(beside)))
    alike = [pair for pair in every if pair[0][0] == pair[1][0]]
    return [(one, other) for (_, one), (_, other) in alike or every]


def _headed(record: Mapping[str, Any]) -> list[tuple[str, Sequence[float]]]:
    """Return machine and losses of a curve, and of its second run."""
    both = (record, record.get("again"))
    return [(each["header"]["machine"], each["losses"]) for each in both if each is not None]


def _twice(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return which curves ran twice, and how far the runs parted."""
    parted: dict[str, list[tuple[float, str]]] = {}
    for name, record in records.items():
        machines, losses = zip(*_headed(record), strict=True)
        if len(losses) == 2:
            where = "the same machine" if len(set(machines)) == 1 else "two machines"
            parted.setdefault(where, []).append((max(_relative(losses[1], losses[0])), name))
    names = [name for name, record in records.items() if "again" in record]
    far = []
    for where, (difference, name) in sorted((key, max(found)) for key, found in parted.items()):
        far.append(f"by {difference:.1e} on {where}" + f" ({name})" * (difference > 0))
    return (
        f"Run twice: {', '.join(names)}. The bounds above hold for both runs, which differ at most "
        f"{' and '.join(far)}."
    )


def _relative(found: Sequence[float], beside: Sequence[float]) -> list[float]:
    return [abs(a - b) / abs(b) for a, b in zip(found, beside, strict=True)]


def tables(records: Mapping[str, Mapping[str, Any]], contract: Contract) -> Iterator[str]:
    """Yield the lines of the contract and of the curves."""
    yield "| contract | value |"
    yield "| --- | --- |"
    for field in fields(contract):
        yield f"| {field.name} | {getattr(contract, field.name)} |"
    yield ""
    yield (
        f"| curve | what | beside | loss, last {WINDOW} steps | first step | equal to 1e-5 for | "
        f"largest difference of one step | "
        f"largest difference averaged over {WINDOW} steps | processor s |"
    )
    yield "| --- " * 9 + "|"
    for name, record in records.items():
        plan, losses = PLANS[name], record["losses"]
        cells = [""] * 5
        if plan.beside in records:
            found = _bounds(distance(*pair) for pair in pairs(record, records[str(plan.beside)]))
            cells = [
                str(plan.beside), f"{found.first:.1e}", f"{found.equal_steps} steps",
                f"{found.single:.1e}", f"{found.averaged:.1e}, to step {found.at}",
            ]  # fmt: skip
        beside, first, equal, single, averaged = cells
        yield (
            f"| {name} | {plan.about} | {beside} | {averages(losses)[-1]:.5f} | {first} | {equal} "
            f"| {single} | {averaged} | {record['processor_seconds']:.0f} |"
        )
    missing = [name for name in PLANS if name not in records]
    yield ""
    yield from _in_words(records)
    yield from (f"- {note}" for names, note in _NOTES if records.keys() >= set(names))
    yield ""
    if any("again" in record for record in records.values()):
        yield _twice(records)
    yield f"Not run: {', '.join(missing) or 'none'}."
    yield ""
    yield from _origins({name: record["header"] for name, record in records.items()})


def _origins(headers: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield date, machine and versions of the first curve, and where others differ."""
    first = next(iter(headers.values()))
    yield f"{first['date'][:10]}, {machine.headline(first)}."
    at_commit: dict[str, list[str]] = {}
    for name, header in headers.items():
        if header["commit"] != first["commit"]:
            at_commit.setdefault(header["commit"], []).append(name)
    if at_commit:
        commits = [f"{commit} ({', '.join(names)})" for commit, names in at_commit.items()]
        yield f"Commits of other curves: {'; '.join(commits)}."
    names_of: dict[str, list[str]] = {}
    for name, header in headers.items():
        if different := _different(_facts(header), _facts(first)):
            names_of.setdefault(different, []).append(name)
    if names_of:
        differences = [f"{what} ({', '.join(names)})" for what, names in names_of.items()]
        yield f"Versions of single curves: {'; '.join(differences)}."


def _facts(header: Mapping[str, Any]) -> dict[str, str]:
    return {"machine": header["machine"], **header["versions"]}


def _different(facts: Mapping[str, str], than: Mapping[str, str]) -> str:
    return ", ".join(
        f"{name} {facts.get(name, 'missing')}"
        for name in {**than, **facts}
        if facts.get(name) != than.get(name)
    )


def _in_words(records: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield to which digit, and for how long, curves of fp32 are equal to those beside them."""
    for what, of in _KINDS.items():
        besides = {
            name: beside
            for name in records
            if (beside := PLANS[name].beside) in records and beside is not None
            and PLANS[name].precision == "32-true" and not PLANS[name].rounding
            and (bool(PLANS[name].experts), PLANS[name].tuning) == of
        }  # fmt: skip
        found = [
            distance(*pair)
            for name, beside in besides.items()
            for pair in pairs(records[name], records[beside])
        ]
        if found:
            yield (
                f"- {what} in fp32: {len(besides)} curve{'s' * (len(besides) > 1)}, equal to the "
                f"curve beside to 1e-5 for {min(each.equal_steps for each in found)} steps, to "
                f"{max(each.single for each in found):.1e} in every step, and to "
                f"{max(each.averaged for each in found):.1e} averaged over {WINDOW} steps."
            )


def csv(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the losses of every step."""
    columns = [record["losses"] for record in records.values()]
    lines = [",".join(["step", *records])]
    lines += [
        ",".join([str(step), *("" if x is None else f"{x:.7g}" for x in losses)])
        for step, losses in enumerate(zip_longest(*columns), 1)
    ]
    return "\n".join(lines) + "\n"


def picture(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return an SVG: losses averaged over a tenth of the window above, and differences below."""
    curves = {name: averages(record["losses"], WINDOW // 10) for name, record in records.items()}
    differences = {
        name: [
            max(one, 1e-9) for one in _relative(*map(averages, pairs(record, records[beside])[0]))
        ]
        for name, record in records.items()
        if (beside := PLANS[name].beside) in records and beside is not None
    }  # fmt: skip
    colors = dict(zip(PLANS, _COLORS, strict=True))
    height = 2 * (_HEIGHT + _GAP) + 18 * len(records) + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        *_panel("loss", curves, colors, _GAP, is_log=False),
        *_panel(
            f"relative difference, averaged over {WINDOW} steps", differences, colors,
            _HEIGHT + 2 * _GAP, is_log=True,
        ),
    ]  # fmt: skip
    num_steps = max(len(record["losses"]) for record in records.values())
    for part in range(5):
        x = _LEFT + (_WIDTH - 10 - _LEFT) * part / 4
        label = f"{num_steps * part // 4}" + " steps" * (part == 4)
        y = 2 * (_HEIGHT + _GAP) + 14
        lines.append(f'<text x="{x:.0f}" y="{y}" text-anchor="end">{label}</text>')
    for number, name in enumerate(records):
        y = 2 * (_HEIGHT + _GAP) + 20 + 18 * (number + 1)
        lines.append(f'<rect x="{_LEFT}" y="{y - 9}" width="18" height="3" fill="{colors[name]}"/>')
        text = escape(f"{name}: {PLANS[name].about}")
        lines.append(f'<text x="{_LEFT + 26}" y="{y}">{text}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(
    title: str,
    curves: Mapping[str, Sequence[float]],
    colors: Mapping[str, str],
    top: int,
    *,
    is_log: bool,
) -> Iterator[str]:
    scaled = {
        name: [math.log10(value) if is_log else value for value in values]
        for name, values in curves.items()
    }
    flat = [value for values in scaled.values() for value in values] or [0.0]
    low, high = math.floor(min(flat)), math.ceil(max(flat))
    high = max(high, low + 1)
    yield f'<text x="{_LEFT}" y="{top - 8}">{escape(title)}</text>'
    for tick in range(low, high + 1):
        y = top + _HEIGHT * (high - tick) / (high - low)
        yield (
            f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
        )
        label = f"1e{tick}" if is_log else str(tick)
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    step = (_WIDTH - 10 - _LEFT) / max(1, *(len(values) - 1 for values in scaled.values()))
    for name, values in scaled.items():
        points = " ".join(
            f"{_LEFT + step * index:.1f},{top + _HEIGHT * (high - value) / (high - low):.1f}"
            for index, value in enumerate(values)
        )
        stroke = f'stroke="{colors[name]}" stroke-width="1.3"'
        yield f'<polyline fill="none" {stroke} points="{points}"/>'


def write_all(folder: Path, contract: Contract) -> None:
    """Write CSV and picture of the kept curves, and the tables of the page.

    Raises:
        ValueError: If no curve of the contract is kept.
    """
    records = kept(contract, folder)
    if not records:
        raise ValueError(
            f"{folder} keeps no curve of this contract. Run python -m benchmarks.curves."
        )
    (folder / "curves.csv").write_text(csv(records))
    PICTURE.write_text(picture(records))
    write(PAGE, list(tables(records, contract)))
