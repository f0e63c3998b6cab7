"""GPipe and the one-forward-one-backward schedules, plain and interleaved. No torch here.

Notation: P pipeline ranks, V model chunks on each, M micro-batches of a pipeline run, N
micro-batches that pass a chunk in one go, stage s of the P * V stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline.schedules.actions import Action, Kind, Placement, Schedule
from megatron_lightning.pipeline.schedules.rows import count_microbatches
from megatron_lightning.pipeline.schedules.simulate import validate


def gpipe(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Return the schedule of all forwards, then all backwards.

    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism"
    (arXiv:1811.06965), section 2.3. With several chunks the schedule is the breadth-first schedule
    of Lamy-Poirier, "Breadth-First Pipeline Parallelism" (arXiv:2211.05953), section 4. The
    backwards run in the order of the forwards, so that gradients are summed in the order of a
    single process. Bubble (P-1)/(MV+P-1). Every micro-batch's activations are alive at once.
    """
    return sweep(
        Placement.loop(num_ranks, num_chunks),
        num_microbatches,
        group_size=num_microbatches,
        name="gpipe",
    )


def sweep(
    placement: Placement,
    num_microbatches: int,
    *,
    group_size: int | None = None,
    name: str = "sweep",
) -> Schedule:
    """Return a schedule for any placement and any number of micro-batches: all forwards, then all
    backwards.

    Groups of ``group_size`` micro-batches (None: as many as pp ranks) visit the stages in turn.
    """
    group_size = group_size or placement.num_ranks

    def stage_calls(kind: Kind, stages: tuple[int, ...]) -> Iterator[Action]:
        for start in range(0, num_microbatches, group_size):
            for stage in stages:
                for microbatch in range(start, min(start + group_size, num_microbatches)):
                    yield Action(stage, kind, microbatch)

    owned = [placement.stages_of(pp_rank) for pp_rank in range(placement.num_ranks)]
    # Gradients travel against the outputs: the last stage of a rank is the first in backward.
    # Groups keep their order, so that micro-batches finish in the order of a single process.
    rows = tuple(
        (*stage_calls(Kind.FORWARD, stages), *stage_calls(Kind.BACKWARD, stages[::-1]))
        for stages in owned
    )
    return Schedule(name, placement, num_microbatches, rows)


def one_f_one_b(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Return the schedule that warms up with forwards, then alternates a forward and a backward.

    PipeDream-Flush of Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training"
    (arXiv:2006.09503), section 3.1. Schedule 1 of "Efficient Large-Scale Language Model Training on
    GPU Clusters Using Megatron-LM" (arXiv:2104.04473), section 2.2.1. The bubble is GPipe's, but
    stage s holds at most P-s micro-batches' activations.
    """
    if num_chunks != 1:
        raise ConfigError(
            "schedule 1f1b runs one model chunk on each pipeline rank, and there are "
            f"{num_chunks}. "
            'Set virtual_pipeline_model_parallel_size to 1, or pipeline_schedule to "interleaved" '
            'or "gpipe".'
        )
    placement = Placement.loop(num_ranks)

    def actions_of(stage: int) -> tuple[Action, ...]:
        forward, backward = (stage, Kind.FORWARD), (stage, Kind.BACKWARD)
        # One more forward for every later stage, since the first micro-batch still has to pass the
        # later stages before the gradient returns.
        warmup = min(num_ranks - 1 - stage, num_microbatches)
        steady = num_microbatches - warmup
        return count_microbatches(
            [forward] * warmup + [forward, backward] * steady + [backward] * warmup,
            num_microbatches,
        )

    actions = tuple(actions_of(placement.stages_of(pp_rank)[0]) for pp_rank in range(num_ranks))
    return Schedule("1f1b", placement, num_microbatches, actions)


def interleaved(
    num_ranks: int, num_microbatches: int, num_chunks: int = 1, group_size: int | None = None
) -> Schedule:
    """Return the 1F1B schedule with V chunks on each pp rank, passed in turn by groups of N
    micro-batches.

    Schedule 2 of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM" (arXiv:2104.04473), section 2.2.2, with Megatron-Core's group size N. The
    bubble is V times smaller than 1F1B's. The first stages' pp rank holds up to 2(P-1)+(V-1)N+1
    activations of a chunk, and a chunk's activation is V times smaller than the activation of all
    chunks. With a single chunk the schedule is 1F1B.

    Args:
        num_ranks: P.
        num_microbatches: M.
        num_chunks: V.
        group_size: N, at least P. The last group may be smaller. With several groups, a last group
            below P can lead to a deadlock, and a deadlock is refused. None: the smallest N without
            such a group.
    """
    if num_chunks == 1:
        if group_size is not None:
            raise ConfigError(
                f"microbatch_group_size_per_vp_stage is {group_size}, and with one model chunk on "
                "each pipeline rank there is nothing to group. Leave it unset, or set "
                "virtual_pipeline_model_parallel_size to 2 or more."
            )
        schedule = one_f_one_b(num_ranks, num_microbatches)
        return Schedule("interleaved", schedule.placement, num_microbatches, schedule.actions)
    size = smallest_group_size(num_ranks, num_microbatches) if group_size is None else group_size
    if size < num_ranks:
        raise ConfigError(
            f"microbatch_group_size_per_vp_stage is {size}, below the {num_ranks} pipeline ranks: "
            f"the first would wait for its own next chunk. Set it to {num_ranks} or more."
        )
    stage_calls = [
        (chunk, microbatch)
        for start in range(0, num_microbatches, size)
        for chunk in range(num_chunks)
        for microbatch in range(start, min(start + size, num_microbatches))
    ]

    def actions_of(stage: int) -> tuple[Action, ...]:  # of the pp rank with this first stage
        forwards = [Action(stage + chunk * num_ranks, Kind.FORWARD, m) for chunk, m in stage_calls]
        backwards = [
            Action(stage + (num_chunks - 1 - chunk) * num_ranks, Kind.BACKWARD, m)
            for chunk, m in stage_calls
        ]
        # Two more forwards for every stage behind this stage, since the last chunk's gradient has
        # to travel back through all pp ranks. Also all earlier chunks of a group before the group's
        # last chunk.
        warmup = min(2 * (num_ranks - 1 - stage) + (num_chunks - 1) * size, len(stage_calls))
        steady = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
        return (*forwards[:warmup], *steady, *backwards[len(stage_calls) - warmup :])

    placement = Placement.loop(num_ranks, num_chunks)
    actions = tuple(actions_of(placement.stages_of(pp_rank)[0]) for pp_rank in range(num_ranks))
    schedule = Schedule("interleaved", placement, num_microbatches, actions)
    _check_groups(schedule, size)
    return schedule


def smallest_group_size(num_ranks: int, num_microbatches: int) -> int:
    """Return the default N of the interleaved schedule."""
    return _fitting_sizes(num_ranks, num_microbatches)[0]


def groups_fill(num_ranks: int, num_microbatches: int, group_size: int) -> bool:
    """Return whether every group has at least P micro-batches, or there is only a single group: the
    interleaved schedule then runs, as fast as the formula says.
    """
    last_group = num_microbatches % group_size
    return last_group == 0 or last_group >= num_ranks or num_microbatches < group_size


def _fitting_sizes(num_ranks: int, num_microbatches: int) -> list[int]:
    sizes = range(num_ranks, num_ranks + num_microbatches + 1)
    return [size for size in sizes if groups_fill(num_ranks, num_microbatches, size)]


def _check_groups(schedule: Schedule, group_size: int) -> None:
    """Refuse a last group below P that leads to a deadlock. Not every such table does."""
    num_ranks, num_microbatches = schedule.placement.num_ranks, schedule.num_microbatches
    if groups_fill(num_ranks, num_microbatches, group_size):
        return
    try:
        validate(schedule)
    except ConfigError as error:
        num_left = num_microbatches % group_size
        sizes = _fitting_sizes(num_ranks, num_microbatches)
        nearest = sorted(sorted(sizes, key=lambda size: abs(size - group_size))[:2])
        raise ConfigError(
            f"{num_microbatches} micro-batches in groups of "
            f"microbatch_group_size_per_vp_stage={group_size} leave a last group of {num_left}, "
            f"smaller than the {num_ranks} pipeline ranks, which would wait for each other "
            f"forever. Set microbatch_group_size_per_vp_stage to {' or '.join(map(str, nearest))}, "
            f"or run {num_microbatches - num_left} or {num_microbatches - num_left + num_ranks} "
            "micro-batches."
        ) from error
