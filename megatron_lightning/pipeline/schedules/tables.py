"""Schedules that a user writes down: rows of text, in Python, in YAML or in a CSV file. No torch here.

One row a pipeline rank, actions in order of execution: ``1F0 1B0``; separated by spaces or, in a file, commas. Cells may be
empty, so that the tables which PyTorch's pipeline schedules print are read as well; those have the first stage on the first
row, and are turned round (see :class:`Placement`).
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline.actions import Action, Placement, Schedule


@dataclass(frozen=True)
class FixedTable:
    """A generator that knows one table: right for one number of ranks, chunks and micro-batches."""

    schedule: Schedule

    def __call__(self, num_coordinates: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
        """Return the table.

        Raises:
            ConfigError: If it is for other numbers.
        """
        schedule = self.schedule
        placement = schedule.placement
        asked = (num_coordinates, num_chunks * num_coordinates, num_microbatches)
        has = (placement.num_coordinates, placement.num_stages, schedule.num_microbatches)
        names = ("pipeline ranks", "stages", "micro-batches")
        for name, wanted, found in zip(names, asked, has, strict=True):
            if wanted != found:
                raise ConfigError(
                    f"schedule {schedule.name} is a table for {found} {name}, and the run has {wanted}. Write a table for "
                    f"{wanted}, or name a function that makes one for any number."
                )
        return schedule


def read_rows(name: str, rows: Sequence[str]) -> Schedule:
    """Return the table that is written in ``rows``.

    Args:
        name: What to call it in messages.
        rows: For each pipeline rank its actions, separated by spaces or commas.

    Raises:
        ConfigError: If something is no action, a row is empty, a stage is on two rows, or the stages do not count up from 0.
    """
    table = [tuple(map(Action.parse, row.replace(",", " ").split())) for row in rows]
    holders: dict[int, int] = {}
    for coordinate, row in enumerate(table):
        if not row:
            raise ConfigError(
                f"schedule {name} has no action in row {coordinate + 1}; a rank without work is of no use. Remove it."
            )
        for action in row:
            if holders.setdefault(action.stage, coordinate) != coordinate:
                raise ConfigError(
                    f"schedule {name} has stage {action.stage} in rows {holders[action.stage] + 1} and {coordinate + 1}; a "
                    "stage lives on one rank. Move its actions into one row."
                )
    if not table or sorted(holders) != list(range(len(holders))):
        raise ConfigError(
            f"schedule {name} has the stages {', '.join(map(str, sorted(holders))) or 'none'}. Number them from 0 without gaps."
        )
    if holders[len(holders) - 1] != 0:
        table.reverse()
        holders = {stage: len(table) - 1 - coordinate for stage, coordinate in holders.items()}
    placement = Placement(tuple(holders[stage] for stage in range(len(holders))))
    num_microbatches = 1 + max(action.microbatch for row in table for action in row)
    return Schedule(name, placement, num_microbatches, tuple(table))


def read_csv(path: str) -> Schedule:
    """Return the table of a CSV file, one line a pipeline rank.

    Raises:
        ConfigError: If the file cannot be read or is no table.
    """
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            rows = [" ".join(cells) for cells in csv.reader(file)]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"pipeline_schedule is {path!r}, which cannot be read as a CSV file: {error}. Set it to a table."
        ) from error
    return read_rows(Path(path).name, [row for row in rows if row.strip()])


def write_csv(schedule: Schedule) -> str:
    """Return a table as the text of a CSV file that :func:`read_csv` reads."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)
