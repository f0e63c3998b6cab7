"""The user's own schedules: rows of text, in Python, in YAML or in a CSV file, and functions. No
torch here.

A row for each pipeline rank, with actions in order of execution: ``1F0 1B0``, separated by spaces
or, in a file, commas. Cells may be empty, so that tables printed by PyTorch's pipeline schedules
are valid, too. PyTorch's tables have the first stage on the first row, and are reversed (see
:class:`Placement`).
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline.schedules.actions import Action, Kind, Placement, Schedule


@dataclass(frozen=True)
class OwnFunction:
    """Generator from the user's function. Errors name the function and the arguments."""

    class_path: str
    function: Callable[[int, int, int], object]

    def __call__(self, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
        """Return the function's table."""
        numbers = (
            f"num_ranks={num_ranks}, num_microbatches={num_microbatches}, num_chunks={num_chunks}"
        )
        called = f"pipeline_schedule={self.class_path}, called with {numbers},"
        try:
            schedule = self.function(num_ranks, num_microbatches, num_chunks)
        except Exception as error:
            raise ConfigError(
                f"{called} raised {type(error).__name__}: {error}. Return a Schedule for these "
                "numbers, or use others."
            ) from error
        if not isinstance(schedule, Schedule):
            raise ConfigError(f"{called} returned {type(schedule).__name__}. Return a Schedule.")
        wrong = [
            a
            for row in schedule.actions
            for a in row
            if not (isinstance(a, Action) and isinstance(a.kind, Kind))
        ]
        if wrong:
            raise ConfigError(
                f"{called} returned a Schedule with {wrong[0]!r} among its actions. Write "
                "Action(stage, Kind.FORWARD, "
                'microbatch), or Action.parse("0F0").'
            )
        return schedule


@dataclass(frozen=True)
class FixedTable:
    """Generator of a single table, for a fixed number of ranks, chunks and micro-batches."""

    schedule: Schedule

    def __call__(self, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
        """Return the table. The numbers must be the table's numbers."""
        schedule = self.schedule
        placement = schedule.placement
        requested_sizes = (num_ranks, num_chunks * num_ranks, num_microbatches)
        has = (placement.num_ranks, placement.num_stages, schedule.num_microbatches)
        names = ("pipeline ranks", "stages", "micro-batches")
        settings = (
            f"set pipeline_model_parallel_size to {has[0]}",
            f"set virtual_pipeline_model_parallel_size to {has[1] // has[0]}",
            f"choose batch size and micro_batch_size so that a batch has {has[2]} micro-batches",
        )
        for name, wanted, size, setting in zip(names, requested_sizes, has, settings, strict=True):
            if wanted != size:
                raise ConfigError(
                    f"schedule {schedule.name} is a table for {size} {name}, and the run has "
                    f"{wanted}. Write a table for {wanted}, name a function that makes one for any "
                    f"number, or {setting}."
                )
        return schedule


def read_rows(name: str, rows: Sequence[str], places: Sequence[str] | None = None) -> Schedule:
    """Return the table written in ``rows``.

    Args:
        name: Name of the table in messages.
        rows: For each pipeline rank the rank's actions, separated by spaces or commas.
        places: Names of the rows in messages. None: "row 1" and so on.

    Raises:
        ConfigError: If a word is no action, a row is empty, a stage is on two rows, the stages are
            not numbered from 0, or the last stage is on neither the first nor the last row.
    """
    places = places or [f"row {number}" for number in range(1, len(rows) + 1)]
    table = [_read_row(name, place, row) for place, row in zip(places, rows, strict=True)]
    holders: dict[int, int] = {}
    for number, row in enumerate(table):
        for action in row:
            if holders.setdefault(action.stage, number) != number:
                raise ConfigError(
                    f"schedule {name} has stage {action.stage} in {places[holders[action.stage]]} "
                    f"and in {places[number]}; a stage lives on one rank. Move its actions into "
                    "one row."
                )
    if not table or sorted(holders) != list(range(len(holders))):
        raise ConfigError(
            f"schedule {name} has the stages {', '.join(map(str, sorted(holders))) or 'none'}. "
            "Number them from 0 without gaps."
        )
    # Published tables begin with the first stage's rank, ours with the last stage's, since rank 0
    # logs the loss. Reversing the ranks changes no order within a row.
    last_stage, last_row = len(holders) - 1, len(table) - 1
    if holders[last_stage] not in {0, last_row}:
        raise ConfigError(
            f"schedule {name} has the last stage, {last_stage}, in {places[holders[last_stage]]}, "
            f"and the first rank logs the loss. Put it into {places[0]} (or {places[-1]}: the rows "
            "are reversed then)."
        )
    if holders[last_stage] != 0:
        table.reverse()
        holders = {stage: last_row - row for stage, row in holders.items()}
    placement = Placement(tuple(holders[stage] for stage in range(len(holders))))
    num_microbatches = 1 + max(action.microbatch for row in table for action in row)
    return Schedule(name, placement, num_microbatches, tuple(table))


def _read_row(name: str, place: str, text: str) -> tuple[Action, ...]:
    try:
        row = tuple(map(Action.parse, text.replace(",", " ").split()))
    except ConfigError as error:
        raise ConfigError(f"schedule {name}, {place}: {error}") from error
    if not row:
        raise ConfigError(f"schedule {name} has no action in {place}. Remove the rank.")
    return row


def read_csv(path: str) -> Schedule:
    """Return the table of a CSV file, a line for each pipeline rank."""
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file)
            lines = [(f"line {reader.line_num}", " ".join(cells)) for cells in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"pipeline_schedule is {path!r}, which cannot be read as a CSV file: {error}. Set it "
            "to a table."
        ) from error
    lines = [(place, text) for place, text in lines if text.strip()]
    return read_rows(Path(path).name, [text for _, text in lines], [place for place, _ in lines])


def write_csv(schedule: Schedule) -> str:
    """Return a table as the text of a CSV file for :func:`read_csv`."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)
