"""Run a schedule on paper: is it complete, does every message arrive in the order it was sent, does no rank wait forever.

Three things are proven of a table. Every (stage, micro-batch) has one forward and one backward (whole, or split in two),
on the coordinate that holds the stage. On every directed channel (forward or backward messages from one coordinate to
another) the receiver takes messages in the order the sender produces them, since NCCL matches them by order alone. No
coordinate waits for an action that can never run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline.actions import SENDS_GRADIENT, Action, Kind, Schedule

Channel = tuple[str, int, int]
"""Direction in the model ("forward" or "backward"), sending and receiving coordinate."""


@dataclass(frozen=True)
class Simulation:
    """What a schedule costs when every action takes one tick and messages take none."""

    ticks: int
    """Length of the step."""
    bubble: float
    """Idle share of all coordinates' ticks, 0 to 1."""
    peak_in_flight: tuple[int, ...]
    """For each coordinate: the most (stage, micro-batch) activations it holds at once."""


def validate(schedule: Schedule) -> None:
    """Prove that a table can run.

    Raises:
        ConfigError: If an action is missing, repeated, out of range or on the wrong coordinate; if a channel's messages
            are received in another order than sent; if a coordinate waits forever (the message says at what, for what).
    """
    _check_complete(schedule)
    _finish_ticks(schedule)
    _check_channels(schedule)


def simulate(schedule: Schedule) -> Simulation:
    """Execute a table tick by tick.

    Raises:
        ConfigError: If a coordinate waits forever.
    """
    ticks = max(_finish_ticks(schedule).values(), default=0)
    work = sum(map(len, schedule.actions))
    bubble = 1 - work / (ticks * len(schedule.actions)) if ticks else 0.0
    return Simulation(ticks, bubble, tuple(map(_peak_in_flight, schedule.actions)))


def _peak_in_flight(actions: tuple[Action, ...]) -> int:
    held = peak = 0
    for action in actions:
        # The first half of a split backward frees nothing: the second still needs the activations.
        held += {Kind.FORWARD: 1, Kind.INPUT_GRADIENT: 0}.get(action.kind, -1)
        peak = max(peak, held)
    return peak


def _check_complete(schedule: Schedule) -> None:
    placement, counts = schedule.placement, Counter[Action]()
    if len(schedule.actions) != placement.num_coordinates:
        raise ConfigError(
            f"schedule {schedule.name} has {len(schedule.actions)} rows and its placement {placement.num_coordinates} "
            "coordinates. Write one row of actions for each coordinate."
        )
    for coordinate, row in enumerate(schedule.actions):
        for action in row:
            if action.stage >= placement.num_stages or action.microbatch >= schedule.num_microbatches:
                raise ConfigError(
                    f"schedule {schedule.name} has action {action}, and there are {placement.num_stages} stages and "
                    f"{schedule.num_microbatches} micro-batches. Remove it."
                )
            if placement.coordinates[action.stage] != coordinate:
                raise ConfigError(
                    f"schedule {schedule.name} has action {action} on pp rank {coordinate}, and stage {action.stage} lives "
                    f"on pp rank {placement.coordinates[action.stage]}. Move it there."
                )
            counts[action] += 1
    repeated = next((action for action, count in counts.items() if count > 1), None)
    if repeated is not None:
        raise ConfigError(f"schedule {schedule.name} has action {repeated} {counts[repeated]} times. Keep one.")
    forward_only = all(action.kind is Kind.FORWARD for action in counts)
    for stage in range(placement.num_stages):
        for microbatch in range(schedule.num_microbatches):
            found = {kind.value for kind in Kind if Action(stage, kind, microbatch) in counts}
            if found not in ([{"F"}] if forward_only else [{"F", "B"}, {"F", "I", "W"}]):
                raise ConfigError(
                    f"schedule {schedule.name} gives stage {stage}, micro-batch {microbatch} the actions "
                    f"{', '.join(sorted(found)) or 'none'}. It needs one F and one B (or one I and one W); leave out "
                    "backwards in the whole table or nowhere."
                )


def _check_channels(schedule: Schedule) -> None:
    """Compare the order in which each channel's messages, named by the action that receives them, are sent and received."""
    sent: dict[Channel, list[tuple[int, int]]] = defaultdict(list)
    received: dict[Channel, list[tuple[int, int]]] = defaultdict(list)
    holders = schedule.placement.coordinates
    for coordinate, row in enumerate(schedule.actions):
        for stage, kind, microbatch in row:
            if kind is Kind.WEIGHT_GRADIENT:
                continue
            step, name = (1, "forward") if kind is Kind.FORWARD else (-1, "backward")
            if 0 <= stage + step < len(holders) and holders[stage + step] != coordinate:
                sent[name, coordinate, holders[stage + step]].append((stage + step, microbatch))
            if 0 <= stage - step < len(holders) and holders[stage - step] != coordinate:
                received[name, holders[stage - step], coordinate].append((stage, microbatch))
    for channel, order in sent.items():
        for (stage, microbatch), taken in zip(order, received[channel], strict=True):
            if (stage, microbatch) != taken:
                name, source, destination = channel
                raise ConfigError(
                    f"schedule {schedule.name}: on the {name} channel from pp rank {source} to {destination} the message for "
                    f"stage {stage}, micro-batch {microbatch} is sent where that for stage {taken[0]}, micro-batch {taken[1]} "
                    "is received first. Put both ranks' actions in the same order."
                )


def _finish_ticks(schedule: Schedule) -> dict[Action, int]:
    """Return the tick at the end of which each action is done; wakes a coordinate when what it waits for is done."""
    finished: dict[Action, int] = {}
    present = {action for row in schedule.actions for action in row}
    position, clock = [0] * len(schedule.actions), [0] * len(schedule.actions)
    waiting: dict[Action, list[int]] = defaultdict(list)
    runnable = list(range(len(schedule.actions)))
    while runnable:
        coordinate = runnable.pop()
        row = schedule.actions[coordinate]
        while position[coordinate] < len(row):
            action = row[position[coordinate]]
            needs = _needs(action, present, schedule.placement.num_stages)
            missing = next((need for need in needs if need not in finished), None)
            if missing is not None:
                waiting[missing].append(coordinate)
                break
            clock[coordinate] = 1 + max([clock[coordinate], *(finished[need] for need in needs)])
            finished[action] = clock[coordinate]
            position[coordinate] += 1
            runnable.extend(waiting.pop(action, ()))
    if waiting:
        stuck = sorted((coordinate, need) for need, coordinates in waiting.items() for coordinate in coordinates)
        waits = "; ".join(f"pp rank {c} waits at {schedule.actions[c][position[c]]} for {need}" for c, need in stuck)
        raise ConfigError(f"schedule {schedule.name} deadlocks: {waits}. Move what is waited for ahead of what waits.")
    return finished


def _needs(action: Action, present: set[Action], num_stages: int) -> tuple[Action, ...]:
    """Return the actions that must be done before this one."""
    stage, kind, microbatch = action
    if kind is Kind.FORWARD:
        return (Action(stage - 1, kind, microbatch),) if stage > 0 else ()
    if kind is Kind.WEIGHT_GRADIENT:
        return (Action(stage, Kind.INPUT_GRADIENT, microbatch),)
    own = Action(stage, Kind.FORWARD, microbatch)
    if stage == num_stages - 1:
        return (own,)
    whole, half = (Action(stage + 1, gradient, microbatch) for gradient in SENDS_GRADIENT)
    return (own, half if half in present else whole)
