"""Executed timeline of a pipeline run as files of JSON lines, a file for each rank. No torch here.

A line is ``{"rank": 3, "stage": 1, "action": "F", "microbatch": 0, "start_s": 0.0123, "end_s":
0.0312}``: the global rank, the rank's action (see
:class:`~megatron_lightning.pipeline.schedules.actions.Kind`) and the times of the action, in
seconds since a moment common to all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.pipeline.schedules.actions import Action, Kind, Placement, Schedule
from megatron_lightning.pipeline.schedules.simulate import Costs

PATTERN = "*.jsonl"
"""Names of the files."""


class Executed(NamedTuple):
    """An executed action."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Trace:
    """Actions executed by the ranks of a pipeline in a run."""

    schedule: Schedule
    """The actions in the order of execution."""
    spans: Mapping[Action, tuple[float, float]]
    """Start and end of every action in seconds. The first action starts at 0."""
    ranks: tuple[int, ...]
    """Global rank of each pipeline rank."""

    def costs(self) -> Costs:
        """Return the mean times of the actions of every stage."""

        def mean(kind: Kind) -> tuple[float, ...]:
            lengths: list[list[float]] = [[] for _ in range(self.schedule.placement.num_stages)]
            for action, (start, end) in self.spans.items():
                if action.kind is kind:
                    lengths[action.stage].append(end - start)
            return tuple(fmean(of_stage) if of_stage else 0.0 for of_stage in lengths)

        return Costs(
            forward=mean(Kind.FORWARD),
            backward=mean(Kind.BACKWARD),
            input_gradient=mean(Kind.INPUT_GRADIENT),
            weight_gradient=mean(Kind.WEIGHT_GRADIENT),
        )


def trace_lines(executed: Iterable[Executed]) -> str:
    """Return the lines of a rank's file."""
    return "".join(
        json.dumps(
            {
                "rank": rank,
                "stage": action.stage,
                "action": action.kind.value,
                "microbatch": action.microbatch,
                "start_s": round(start_s, 7),
                "end_s": round(end_s, 7),
            }
        )
        + "\n"
        for rank, action, start_s, end_s in executed
    )


def read_trace(directory: str) -> Trace:
    """Return the trace of the first of a job's pipelines.

    Among ranks with the same stages (tensor- and data-parallel ranks), the lowest rank is read.

    Raises:
        ConfigError: If there is no such directory, or no trace in the directory.
        DataError: If a file holds something else, or the ranks are no full pipeline.
    """
    files = sorted(Path(directory).glob(PATTERN))
    if not files:
        raise ConfigError(
            f"there is no trace ({PATTERN}) in {directory}. Name the directory that the run's "
            "callback wrote to."
        )
    executed = [line for file in files for line in _read_file(file)]
    if not executed:
        raise DataError(
            f"the traces in {directory} are empty. Record a step, and let the run end in order."
        )
    rows: dict[int, list[Executed]] = {}
    for line in executed:
        rows.setdefault(line.rank, []).append(line)
    # Ranks with equal stages ran the same row. One of them stands for all, since times of several
    # clocks in one row would overlap.
    first_of: dict[frozenset[int], int] = {}
    for rank in sorted(rows):
        first_of.setdefault(frozenset(line.action.stage for line in rows[rank]), rank)
    return _trace(directory, {rank: rows[rank] for rank in sorted(first_of.values())})


def _trace(directory: str, rows: Mapping[int, list[Executed]]) -> Trace:
    ordered = [sorted(row, key=lambda line: line.start_s) for row in rows.values()]
    holders = {line.action.stage: pp_rank for pp_rank, row in enumerate(ordered) for line in row}
    if sorted(holders) != list(range(len(holders))):
        stages = ", ".join(map(str, sorted(holders)))
        raise DataError(
            f"the traces in {directory} are of the stages {stages} only. Copy the files of all "
            "ranks there."
        )
    try:
        placement = Placement(tuple(holders[stage] for stage in range(len(holders))))
    except ConfigError as error:
        raise DataError(f"the traces in {directory} are not of one pipeline: {error}") from error
    begin = min(line.start_s for row in ordered for line in row)
    spans = {
        line.action: (line.start_s - begin, line.end_s - begin) for row in ordered for line in row
    }
    num_microbatches = 1 + max(action.microbatch for action in spans)
    actions = tuple(tuple(line.action for line in row) for row in ordered)
    return Trace(Schedule("executed", placement, num_microbatches, actions), spans, tuple(rows))


def _read_file(path: Path) -> Iterable[Executed]:
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            line = json.loads(text)
            action = Action(int(line["stage"]), Kind(line["action"]), int(line["microbatch"]))
            yield Executed(int(line["rank"]), action, float(line["start_s"]), float(line["end_s"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{path}, line {number}, is no executed action ({error!r}): {text[:80]!r}."
            ) from error
