"""Validate and simulate a schedule: completeness, order of messages, deadlock, and time of a run,
idle share, memory.

Validation proves three properties of a table. First, every (stage, micro-batch) has a forward and a
backward (full, or split in two), on the stage's pp rank. Second, on every directed channel (forward
or backward messages from a pp rank to another) the receiver takes messages in the order of sending,
since NCCL matches messages by order alone. Third, no pp rank waits for an action that can never
run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf

from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline.schedules.actions import SENDS_GRADIENT, Action, Kind, Schedule

Channel = tuple[str, int, int]
"""Direction in the model ("forward" or "backward"), sending and receiving pp rank."""

PerStage = float | tuple[float, ...]
"""A number for all stages, or a number for each stage."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Time and memory of the actions of every stage, in any units."""

    forward: PerStage = 1.0
    """F: forward of a micro-batch."""
    input_gradient: PerStage = 1.0
    """I: gradient of the stage's input."""
    weight_gradient: PerStage = 1.0
    """W: gradient of the stage's weights."""
    backward: PerStage | None = None
    """B: full backward. None: I and W together."""
    communication: float = 0.0
    """From the end of an action to the arrival of the action's message on another pp rank. The
    sender does not wait."""
    activation: PerStage = 1.0
    """Memory that a stage holds of a micro-batch from the forward to the end of the backward (W of
    a split backward)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not all(
                0 <= number < inf for number in (value if isinstance(value, tuple) else (value,))
            ):
                raise ConfigError(
                    f"cost {field.name} is {value}, which is no cost. Set it to a finite number of "
                    "0 or more."
                )

    def durations(self, num_stages: int) -> Mapping[Kind, tuple[float, ...]]:
        """Return the time of each kind of action on every stage."""
        input_gradient = _per_stage("input_gradient", self.input_gradient, num_stages)
        weight_gradient = _per_stage("weight_gradient", self.weight_gradient, num_stages)
        full_backward = tuple(map(sum, zip(input_gradient, weight_gradient, strict=True)))
        return {
            Kind.FORWARD: _per_stage("forward", self.forward, num_stages),
            Kind.BACKWARD: full_backward
            if self.backward is None
            else _per_stage("backward", self.backward, num_stages),
            Kind.INPUT_GRADIENT: input_gradient,
            Kind.WEIGHT_GRADIENT: weight_gradient,
        }

    def activations(self, num_stages: int) -> tuple[float, ...]:
        """Return the memory that every stage holds of a micro-batch."""
        return _per_stage("activation", self.activation, num_stages)


@dataclass(frozen=True)
class Simulation:
    """Cost of a run of a schedule, in the units of the :class:`Costs`."""

    step_time: float
    """From the first action's start to the last action's end."""
    bubble: float
    """Idle share of all pp ranks' time, 0 to 1."""
    peak_in_flight: tuple[int, ...]
    """For each pp rank: the most (stage, micro-batch) activations held at once."""
    peak_activations: tuple[float, ...]
    """For each pp rank: the most memory held in activations."""
    spans: Mapping[Action, tuple[float, float]]
    """Start and end of every action."""


def validate(schedule: Schedule) -> None:
    """Prove that a table can run.

    Raises:
        ConfigError: If an action is missing, repeated, out of range or on the wrong pp rank. If a
            channel's messages are received in another order than sent. If a pp rank waits forever
            (the message names both actions).
    """
    _check_complete(schedule)
    _execute(schedule, Costs())
    _check_channels(schedule)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Simulate a table: every action starts as soon as the pp rank is free and the action's
    messages have arrived.

    Args:
        schedule: The table.
        costs: Costs of the actions. None: F, I and W a unit each, B two, messages nothing.
    """
    costs = costs or Costs()
    spans = _execute(schedule, costs)
    step_time = max((end for _, end in spans.values()), default=0.0)
    busy = sum(end - start for start, end in spans.values())
    bubble = 1 - busy / (step_time * len(schedule.actions)) if step_time else 0.0
    units = (1.0,) * schedule.placement.num_stages
    weights = costs.activations(schedule.placement.num_stages)
    return Simulation(
        step_time,
        bubble,
        tuple(round(_peak(row, units)) for row in schedule.actions),
        tuple(_peak(row, weights) for row in schedule.actions),
        spans,
    )


def _per_stage(name: str, value: PerStage, num_stages: int) -> tuple[float, ...]:
    if not isinstance(value, tuple):
        return (float(value),) * num_stages
    if len(value) != num_stages:
        raise ConfigError(
            f"cost {name} has {len(value)} numbers, and there are {num_stages} stages. Give one "
            "for each stage, or one for all."
        )
    return value


def _peak(actions: tuple[Action, ...], weights: tuple[float, ...]) -> float:
    current = peak = 0.0
    for stage, kind, _ in actions:
        if kind is Kind.FORWARD:
            current += weights[stage]
            peak = max(peak, current)
        elif kind is not Kind.INPUT_GRADIENT:  # the weight gradient still needs the activations
            current -= weights[stage]
    return peak


def _check_complete(schedule: Schedule) -> None:
    placement, counts = schedule.placement, Counter[Action]()
    if len(schedule.actions) != placement.num_ranks:
        raise ConfigError(
            f"schedule {schedule.name} has {len(schedule.actions)} rows and its placement "
            f"{placement.num_ranks} pp ranks. Write one row of actions for each pp rank."
        )
    for pp_rank, row in enumerate(schedule.actions):
        for action in row:
            if not (
                0 <= action.stage < placement.num_stages
                and 0 <= action.microbatch < schedule.num_microbatches
            ):
                raise ConfigError(
                    f"schedule {schedule.name} has action {action}, and there are "
                    f"{placement.num_stages} stages and {schedule.num_microbatches} micro-batches. "
                    "Remove it."
                )
            if placement.pp_ranks[action.stage] != pp_rank:
                raise ConfigError(
                    f"schedule {schedule.name} has action {action} on pp rank {pp_rank}, and stage "
                    f"{action.stage} lives on pp rank {placement.pp_ranks[action.stage]}. Move it "
                    "there."
                )
            counts[action] += 1
    repeated = next((action for action, count in counts.items() if count > 1), None)
    if repeated is not None:
        raise ConfigError(
            f"schedule {schedule.name} has action {repeated} {counts[repeated]} times. Keep one."
        )
    # Evaluation runs tables without backwards. In training a micro-batch needs a full or a split
    # backward on each stage, and never both.
    forward_only = all(action.kind is Kind.FORWARD for action in counts)
    for stage in range(placement.num_stages):
        for microbatch in range(schedule.num_microbatches):
            kinds = {kind.value for kind in Kind if Action(stage, kind, microbatch) in counts}
            if kinds not in ([{"F"}] if forward_only else [{"F", "B"}, {"F", "I", "W"}]):
                raise ConfigError(
                    f"schedule {schedule.name} gives stage {stage}, micro-batch {microbatch} the "
                    f"actions {', '.join(sorted(kinds)) or 'none'}. It needs one F and one B (or "
                    "one I and one W); leave out all backwards of a table or none."
                )


def _check_channels(schedule: Schedule) -> None:
    """Compare the order of sending and of receiving each channel's messages. The receiving action
    names a message.
    """
    sends: dict[Channel, list[tuple[int, int]]] = defaultdict(list)
    receives: dict[Channel, list[tuple[int, int]]] = defaultdict(list)
    holders = schedule.placement.pp_ranks
    # Each rank sends and receives in the order of its own row. A channel delivers in order, so both
    # rows must name the same messages in the same order.
    for pp_rank, row in enumerate(schedule.actions):
        for stage, kind, microbatch in row:
            if kind is Kind.WEIGHT_GRADIENT:
                continue
            step, name = (1, "forward") if kind is Kind.FORWARD else (-1, "backward")
            if 0 <= stage + step < len(holders) and holders[stage + step] != pp_rank:
                # Stages on one rank hand over in memory, without a channel.
                sends[name, pp_rank, holders[stage + step]].append((stage + step, microbatch))
            if 0 <= stage - step < len(holders) and holders[stage - step] != pp_rank:
                receives[name, holders[stage - step], pp_rank].append((stage, microbatch))
    for channel, order in sends.items():
        for (stage, microbatch), receive in zip(order, receives[channel], strict=True):
            if (stage, microbatch) != receive:
                name, source, destination = channel
                raise ConfigError(
                    f"schedule {schedule.name}: on the {name} channel from pp rank {source} to "
                    f"{destination} the message for stage {stage}, micro-batch {microbatch} is "
                    f"sent where that for stage {receive[0]}, micro-batch {receive[1]} is received "
                    "first. Put both ranks' actions in the same order."
                )


def _execute(schedule: Schedule, costs: Costs) -> dict[Action, tuple[float, float]]:
    """Return start and end of each action. A pp rank resumes when the awaited action is done."""
    spans: dict[Action, tuple[float, float]] = {}
    holders, num_stages = schedule.placement.pp_ranks, schedule.placement.num_stages
    durations, communication = costs.durations(num_stages), costs.communication
    actions = {action for row in schedule.actions for action in row}
    position, clock = [0] * len(schedule.actions), [0.0] * len(schedule.actions)
    # A pp rank runs until a prerequisite is missing, and the prerequisite wakes the pp rank: no
    # polling, so that the time is linear in the number of actions.
    waiting: dict[Action, list[int]] = defaultdict(list)
    runnable = list(range(len(schedule.actions)))
    while runnable:
        pp_rank = runnable.pop()
        row = schedule.actions[pp_rank]
        while position[pp_rank] < len(row):
            action = row[position[pp_rank]]
            start = clock[pp_rank]
            for need in _needs(action, actions, num_stages):
                if need not in spans:
                    waiting[need].append(pp_rank)
                    break
                start = max(
                    start,
                    spans[need][1] + (communication if holders[need.stage] != pp_rank else 0.0),
                )
            else:
                clock[pp_rank] = start + durations[action.kind][action.stage]
                spans[action] = (start, clock[pp_rank])
                position[pp_rank] += 1
                runnable.extend(waiting.pop(action, ()))
                continue
            break
    # No pp rank is runnable any more, so waiting pp ranks wait forever.
    if waiting:
        stuck = sorted(
            (pp_rank, need) for need, pp_ranks in waiting.items() for pp_rank in pp_ranks
        )
        waits = "; ".join(
            f"pp rank {c} waits at {schedule.actions[c][position[c]]} for {need}"
            for c, need in stuck
        )
        raise ConfigError(
            f"schedule {schedule.name} deadlocks: {waits}. Move the actions that others wait for "
            "ahead of those that wait."
        )
    return spans


def _needs(action: Action, present: set[Action], num_stages: int) -> tuple[Action, ...]:
    """Return the prerequisites of an action."""
    stage, kind, microbatch = action
    if kind is Kind.FORWARD:
        return (Action(stage - 1, kind, microbatch),) if stage > 0 else ()
    if kind is Kind.WEIGHT_GRADIENT:
        return (Action(stage, Kind.INPUT_GRADIENT, microbatch),)
    forward = Action(stage, Kind.FORWARD, microbatch)
    if stage == num_stages - 1:
        return (forward,)
    full_backward, half = (Action(stage + 1, gradient, microbatch) for gradient in SENDS_GRADIENT)
    return (forward, half if half in present else full_backward)
