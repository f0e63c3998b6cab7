"""What one coordinate has to do for a schedule, with everything looked up beforehand that the table decides. No torch here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron_lightning.pipeline.actions import SENDS_GRADIENT, Action, Kind, Schedule
from megatron_lightning.pipeline.simulate import simulate

_SLACK = 2  # messages; stages are never as even as on paper


class Message(NamedTuple):
    """What passes between two neighbouring stages, as one of its two ends sees it."""

    forward: bool
    """Direction in the model: outputs go forward, their gradients backward."""
    stage: int
    """The stage that takes it."""
    microbatch: int
    peer: int | None
    """Coordinate at the other end; None: both stages are here."""
    peer_position: int
    """Position, in the peer's list, of the action at the other end."""
    tag: int
    """Unlike that of any other message of the same direction in the step."""
    ahead: int = 0
    """Where it is sent: how many earlier ones of the same channel may still be under way."""


class Planned(NamedTuple):
    """One action with the messages it takes and gives; None at the ends of the pipeline and for weight gradients."""

    action: Action
    takes: Message | None
    gives: Message | None
    completes: bool
    """Whether the gradients of the action's stage are complete after it."""


@dataclass(frozen=True)
class Plan:
    """A coordinate's part of a schedule."""

    actions: tuple[Planned, ...]
    """In the order of execution."""
    received: Mapping[tuple[bool, int], tuple[Message, ...]]
    """(direction in the model, peer) -> what arrives on that channel, in order."""
    peers: frozenset[int]
    """Coordinates that this one exchanges messages with."""


def plan_of(schedule: Schedule, coordinate: int) -> Plan:
    """Return the actions of one coordinate with their messages."""
    holders, positions, last_stage = schedule.placement.coordinates, schedule.positions, schedule.placement.num_stages - 1

    def other_end(forward: bool, stage: int, microbatch: int) -> int:
        kinds = (Kind.FORWARD,) if forward else SENDS_GRADIENT
        return next(positions[action] for kind in kinds if (action := Action(stage, kind, microbatch)) in positions)

    def message(forward: bool, taker: int, peer_stage: int, microbatch: int) -> Message | None:
        if not (0 <= taker <= last_stage and 0 <= peer_stage <= last_stage):
            return None
        peer = holders[peer_stage] if holders[peer_stage] != coordinate else None
        tag = taker * schedule.num_microbatches + microbatch
        return Message(forward, taker, microbatch, peer, other_end(forward, peer_stage, microbatch), tag)

    own = schedule.actions[coordinate]
    last_of_stage = {action.stage: action for action in own if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)}
    spans = simulate(schedule).spans
    taken_at: dict[tuple[bool, int], list[float]] = {}

    def bounded(gives: Message, action: Action) -> Message:
        """Say how many earlier messages may be under way: as many as on paper, and some more.

        Who waits for one of the others waits for an action that starts before his own on paper, so nobody waits in a circle.
        """
        if gives.peer is None:
            return gives
        earlier = taken_at.setdefault((gives.forward, gives.peer), [])
        ahead = len(earlier) - bisect_left(earlier, spans[action][0]) + _SLACK
        earlier.append(spans[schedule.actions[gives.peer][gives.peer_position]][0])
        return gives._replace(ahead=ahead)

    planned = []
    for action in own:
        stage, kind, microbatch = action
        takes = gives = None
        if kind is not Kind.WEIGHT_GRADIENT:
            forward = kind is Kind.FORWARD
            hop = 1 if forward else -1
            takes = message(forward, stage, stage - hop, microbatch)
            gives = message(forward, stage + hop, stage + hop, microbatch)
            gives = gives and bounded(gives, action)
        planned.append(Planned(action, takes, gives, last_of_stage.get(stage) == action))
    received: dict[tuple[bool, int], list[Message]] = {}
    for planned_action in planned:
        taken = planned_action.takes
        if taken is not None and taken.peer is not None:
            received.setdefault((taken.forward, taken.peer), []).append(taken)
    ends = (end for planned_action in planned for end in (planned_action.takes, planned_action.gives) if end is not None)
    return Plan(
        tuple(planned),
        {channel: tuple(messages) for channel, messages in received.items()},
        frozenset(end.peer for end in ends if end.peer is not None),
    )
