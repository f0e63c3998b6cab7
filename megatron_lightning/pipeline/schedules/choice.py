"""Resolve the user's ``pipeline_schedule`` to proven tables. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline.schedules.actions import Kind, Placement, Schedule
from megatron_lightning.pipeline.schedules.one_f_one_b import gpipe, interleaved, one_f_one_b, sweep
from megatron_lightning.pipeline.schedules.simulate import validate
from megatron_lightning.pipeline.schedules.tables import (
    FixedTable,
    OwnFunction,
    read_csv,
    read_rows,
)
from megatron_lightning.pipeline.schedules.zero_bubble import zb_h1, zbv

Generator = Callable[[int, int, int], Schedule]
"""A function from (pipeline ranks, micro-batches, chunks on each pipeline rank) to a table."""

SCHEDULES: Mapping[str, Generator] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zb-h1": zb_h1, "zbv": zbv}
)
"""Generators by the name used in ``pipeline_schedule``."""


@dataclass(frozen=True)
class ScheduleChoice:
    """A schedule for a pipeline, for any number of micro-batches."""

    name: str
    reason: str
    """Reason of the choice, as half a sentence: "it was asked for"."""
    num_chunks: int
    generator: Generator
    sample: Schedule
    """A table of the schedule, proven."""

    @property
    def placement(self) -> Placement:
        """Map from stages to pipeline ranks."""
        return self.sample.placement

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed after input gradients, by actions of their own."""
        return self.sample.splits_backward

    def __str__(self) -> str:
        """Return name and reason, for logs."""
        return f"{self.name} ({self.reason})"

    def table(self, num_microbatches: int) -> Schedule:
        """Return the proven table for ``num_microbatches``.

        Raises:
            ConfigError: If the schedule cannot run this number of micro-batches, or is invalid.
        """
        if num_microbatches < 1:
            raise ConfigError(
                f"num_microbatches is {num_microbatches}; it must be a positive integer."
            )
        schedule = self.generator(self.placement.num_ranks, num_microbatches, self.num_chunks)
        if schedule.placement != self.placement or schedule.num_microbatches != num_microbatches:
            raise ConfigError(
                f"schedule {self.name} returned a table for {schedule.num_microbatches} "
                f"micro-batches on the placement {schedule.placement.pp_ranks}; asked for were "
                f"{num_microbatches}, and the first table had {self.placement.pp_ranks}. Return "
                "what is asked for, on one placement for all numbers of micro-batches."
            )
        validate(schedule)
        return schedule

    def table_or_sweep(self, num_microbatches: int) -> Schedule:
        """Return the table for ``num_microbatches``. If the schedule cannot run the number, return
        :func:`sweep`.

        The last batch of the data may be smaller than the batches that a table was written for.
        """
        try:
            return self.table(num_microbatches)
        except ConfigError:
            return sweep(self.placement, num_microbatches)

    def forward_table(self, num_microbatches: int) -> Schedule:
        """Return only the forwards, for any number of micro-batches, for validation and
        prediction.
        """
        return forward_only(self.table_or_sweep(num_microbatches))


def resolve(
    spec: str | Sequence[str],
    *,
    num_ranks: int,
    num_chunks: int = 1,
    microbatch_group_size: int | None = None,
) -> ScheduleChoice:
    """Return the schedule of a user's ``pipeline_schedule`` for a layout.

    ``"auto"`` is 1F1B with a single chunk on each pipeline rank and interleaved 1F1B with several.

    Args:
        spec: A key of :data:`SCHEDULES`, ``"auto"``, a CSV file, the class path of a
            :data:`Generator`, or rows of actions.
        num_ranks: Pipeline ranks.
        num_chunks: Model chunks on each pipeline rank.
        microbatch_group_size: Micro-batches that pass a chunk in one go, for the interleaved
            schedule.

    Raises:
        ConfigError: If the name is unknown, or the schedule cannot run on this layout.
    """
    for size_name, size in (("num_ranks", num_ranks), ("num_chunks", num_chunks)):
        if size < 1:
            raise ConfigError(f"{size_name} is {size}; it must be a positive integer.")
    name, reason = spec, "it was asked for"
    if name == "auto":
        name = "1f1b" if num_chunks == 1 else "interleaved"
        holds = "one model chunk" if num_chunks == 1 else f"{num_chunks} model chunks"
        ranks = (
            "the one pipeline rank" if num_ranks == 1 else f"each of the {num_ranks} pipeline ranks"
        )
        reason = f"{ranks} holds {holds}"
    if isinstance(name, str) and name in SCHEDULES:
        label, generator = name, SCHEDULES[name]
    else:
        label, generator = _own_generator(name)
    if microbatch_group_size is not None:
        if label != "interleaved":
            raise ConfigError(
                f"microbatch_group_size_per_vp_stage is {microbatch_group_size}, and schedule "
                f"{label} does not group "
                'micro-batches. Leave it unset, or set pipeline_schedule to "interleaved".'
            )
        generator = partial(interleaved, group_size=microbatch_group_size)
    # A table is made and validated now, before any process exists, and not in the first step.
    sample = _sample(label, generator, num_ranks, num_chunks, microbatch_group_size)
    return ScheduleChoice(label, reason, num_chunks, generator, sample)


def make_schedule(
    name: str | Sequence[str],
    *,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 1,
    microbatch_group_size: int | None = None,
) -> Schedule:
    """Return the proven table of a schedule. The arguments are the arguments of :func:`resolve` and
    the number of micro-batches.
    """
    choice = resolve(
        name,
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        microbatch_group_size=microbatch_group_size,
    )
    return choice.table(num_microbatches)


def forward_only(schedule: Schedule) -> Schedule:
    """Return the forwards of a schedule in order, for validation and prediction."""
    actions = tuple(
        tuple(action for action in row if action.kind is Kind.FORWARD) for row in schedule.actions
    )
    return replace(schedule, actions=actions)


def _sample(
    label: str, generator: Generator, num_ranks: int, num_chunks: int, num_microbatches: int | None
) -> Schedule:
    """Return a sample table of a schedule, which shows the placement and proves a schedule of the
    user's own.
    """
    num_stages = num_ranks * num_chunks
    if isinstance(generator, FixedTable):
        num_microbatches = generator.schedule.num_microbatches
    schedule = generator(num_ranks, num_microbatches or num_stages, num_chunks)
    placement = schedule.placement
    if (placement.num_ranks, placement.num_stages) != (num_ranks, num_stages):
        raise ConfigError(
            f"pipeline_schedule={label} places {placement.num_stages} stages on "
            f"{placement.num_ranks} pipeline ranks, and the layout has {num_stages} on "
            f"{num_ranks}. Place as many as pipeline_model_parallel_size x "
            "virtual_pipeline_model_parallel_size."
        )
    validate(schedule)
    if all(action.kind is Kind.FORWARD for row in schedule.actions for action in row):
        raise ConfigError(
            f"pipeline_schedule={label} has no backwards, which training needs. Write B (or I and "
            "W) of every F."
        )
    return schedule


def _own_generator(spec: str | Sequence[str]) -> tuple[str, Generator]:
    if not isinstance(spec, str | Sequence):
        raise ConfigError(
            f"pipeline_schedule is {spec!r}, which is neither a name nor rows of actions. Set it "
            f"to one of {', '.join(('auto', *SCHEDULES))}."
        )
    # Three kinds, told apart by form alone: rows, a file, or a dotted path.
    if not isinstance(spec, str):
        return "table", FixedTable(read_rows("table", spec))
    if spec.endswith(".csv"):
        schedule = read_csv(spec)
        return schedule.name, FixedTable(schedule)
    module, _, function = spec.rpartition(".")
    if not module:
        names = ", ".join(("auto", *SCHEDULES))
        raise ConfigError(
            f"pipeline_schedule is {spec!r}, which names no schedule. Set it to one of {names}, to "
            "a CSV file, or to the class path of a function that makes a Schedule."
        )
    try:
        generator: Any = getattr(import_module(module), function)
    except (ImportError, AttributeError, TypeError) as error:  # a TypeError is a relative path's
        raise ConfigError(
            f"pipeline_schedule is {spec!r}, which cannot be imported: {error}. Set it to the "
            "class path of a function of (num_ranks, num_microbatches, num_chunks) that returns a "
            "Schedule."
        ) from error
    if not callable(generator):
        raise ConfigError(
            f"pipeline_schedule is {spec!r}, a {type(generator).__name__}. Set it to a function."
        )
    return spec, OwnFunction(spec, generator)
