"""Pipeline schedules as data: pure functions of sizes that return tables. No torch here.

Each generator names its paper. All of them place the last stage on coordinate 0 (see :class:`Placement`); a table is
proven by :func:`megatron_lightning.pipeline.simulate.validate` and run by the executor, which decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from types import MappingProxyType

from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline.actions import Action, Kind, Placement, Schedule


def gpipe(num_coordinates: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Return the schedule that runs all forwards, then all backwards.

    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (arXiv:1811.06965),
    section 2.3. The backwards run in the order of the forwards, so that gradients are summed in the order of one process.
    Bubble (P-1)/(M+P-1) for one chunk; every micro-batch's activations are alive at once.
    """
    placement = Placement.loop(num_coordinates, num_chunks)

    def sweep(kind: Kind, stages: tuple[int, ...]) -> tuple[Action, ...]:
        return tuple(Action(stage, kind, microbatch) for stage in stages for microbatch in range(num_microbatches))

    owned = [placement.stages_of(coordinate) for coordinate in range(num_coordinates)]
    actions = tuple((*sweep(Kind.FORWARD, stages), *sweep(Kind.BACKWARD, stages[::-1])) for stages in owned)
    return Schedule("gpipe", placement, num_microbatches, actions)


def one_f_one_b(num_coordinates: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Return the schedule that warms up with forwards, then alternates one forward and one backward.

    PipeDream-Flush of Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (arXiv:2006.09503), section
    3.1; schedule 1 of "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
    (arXiv:2104.04473), section 2.2.1. GPipe's bubble, but stage s holds at most P-s micro-batches' activations.

    Raises:
        ConfigError: If there is more than one chunk on a coordinate.
    """
    if num_chunks != 1:
        raise ConfigError(
            f"schedule 1f1b runs one model chunk on each pipeline rank, and there are {num_chunks}. "
            'Set virtual_pipeline_model_parallel_size to 1, or pipeline_schedule to "gpipe".'
        )
    placement = Placement.loop(num_coordinates)

    def actions_of(stage: int) -> tuple[Action, ...]:
        forwards = [Action(stage, Kind.FORWARD, microbatch) for microbatch in range(num_microbatches)]
        backwards = [Action(stage, Kind.BACKWARD, microbatch) for microbatch in range(num_microbatches)]
        # One forward more for every stage that the first micro-batch still has to pass before its gradient returns.
        warmup = min(num_coordinates - 1 - stage, num_microbatches)
        steady = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
        return (*forwards[:warmup], *steady, *backwards[num_microbatches - warmup :])

    actions = tuple(actions_of(placement.stages_of(coordinate)[0]) for coordinate in range(num_coordinates))
    return Schedule("1f1b", placement, num_microbatches, actions)


SCHEDULES: Mapping[str, Callable[[int, int, int], Schedule]] = MappingProxyType({"gpipe": gpipe, "1f1b": one_f_one_b})
"""Generators of (coordinates, micro-batches, chunks on each coordinate) by the name used in ``pipeline_schedule``."""


def resolve(name: str, num_chunks: int = 1) -> str:
    """Return the name of a known schedule, choosing one for ``"auto"``: 1F1B, or GPipe where there are several chunks.

    Raises:
        ConfigError: If the name is unknown.
    """
    if name == "auto":
        return "1f1b" if num_chunks == 1 else "gpipe"
    if name not in SCHEDULES:
        known = ", ".join(("auto", *SCHEDULES))
        raise ConfigError(f"pipeline_schedule is {name!r}, which names no schedule. Set it to one of {known}.")
    return name


def make_schedule(name: str, *, num_coordinates: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Return the table of a schedule by name.

    Args:
        name: A key of :data:`SCHEDULES`, or ``"auto"``.
        num_coordinates: Pipeline ranks.
        num_microbatches: Micro-batches of a step.
        num_chunks: Model chunks on each pipeline rank.

    Raises:
        ConfigError: If the name is unknown, a number is below 1, or the schedule cannot run with these numbers.
    """
    sizes = {"num_coordinates": num_coordinates, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    for size_name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{size_name} is {size}; a pipeline step needs at least one. Set it to 1 or more.")
    return SCHEDULES[resolve(name, num_chunks)](num_coordinates, num_microbatches, num_chunks)


def forward_only(schedule: Schedule) -> Schedule:
    """Return the forwards of a schedule in their order, as validation and prediction run them."""
    actions = tuple(tuple(action for action in row if action.kind is Kind.FORWARD) for row in schedule.actions)
    return replace(schedule, actions=actions)
