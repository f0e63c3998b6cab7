"""One pp rank's part of a schedule: its actions, with all their messages looked up in advance. No
torch here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from megatron_lightning.pipeline.actions import SENDS_GRADIENT, Action, Kind, Schedule
from megatron_lightning.pipeline.simulate import simulate

_SLACK = 2  # messages; stages are never as even as on paper


class Message(NamedTuple):
    """Tensors between two neighboring stages, as one of the two ends sees them."""

    forward: bool
    """Direction in the model: outputs go forward, their gradients backward."""
    stage: int
    """Stage that takes them."""
    microbatch: int
    peer: int | None
    """Pipeline rank at the other end; None: both stages are here."""
    peer_position: int
    """Position, in the peer's list, of the action at the other end."""
    tag: int
    """Unique among the messages of one direction in the run."""
    ahead: int = 0
    """For the sender: how many earlier messages of the channel may still be in flight."""


class Planned(NamedTuple):
    """Action with the messages that it takes and gives; None at the ends of the pipeline and for
    weight gradients.
    """

    action: Action
    takes: Message | None
    gives: Message | None
    completes: bool
    """Whether the gradients of the action's stage are complete after it."""


@dataclass(frozen=True)
class Plan:
    """A pp rank's part of a schedule."""

    actions: tuple[Planned, ...]
    """Actions in the order of execution."""
    received: Mapping[tuple[bool, int], Sequence[Message]]
    """(direction in the model, peer) -> messages that arrive on that channel, in order."""
    peers: Set[int]
    """Pipeline ranks that exchange messages with this one."""


def plan_of(schedule: Schedule, pp_rank: int) -> Plan:
    """Return the actions of one pp rank with their messages."""
    holders, positions, last_stage = (
        schedule.placement.pp_ranks,
        schedule.positions,
        schedule.placement.num_stages - 1,
    )

    def other_end(forward: bool, stage: int, microbatch: int) -> int:
        kinds = (Kind.FORWARD,) if forward else SENDS_GRADIENT
        return next(
            positions[action]
            for kind in kinds
            if (action := Action(stage, kind, microbatch)) in positions
        )

    def message(forward: bool, taker: int, peer_stage: int, microbatch: int) -> Message | None:
        if not (0 <= taker <= last_stage and 0 <= peer_stage <= last_stage):
            return None
        peer = holders[peer_stage] if holders[peer_stage] != pp_rank else None
        tag = taker * schedule.num_microbatches + microbatch
        return Message(
            forward, taker, microbatch, peer, other_end(forward, peer_stage, microbatch), tag
        )

    own = schedule.actions[pp_rank]
    last_of_stage = {
        action.stage: action
        for action in own
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)
    }
    spans = simulate(schedule).spans
    taken_at: dict[tuple[bool, int], list[float]] = {}

    def bounded(gives: Message, action: Action) -> Message:
        """Limit the earlier messages in flight: as many as in the simulation, and some more.

        A sender that waits for one beyond waits for an action that starts earlier in the
        simulation, so there is no circle.
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
    peers = set()
    for _, takes, gives, _ in planned:
        if takes is not None and takes.peer is not None:
            received.setdefault((takes.forward, takes.peer), []).append(takes)
        peers |= {end.peer for end in (takes, gives) if end is not None and end.peer is not None}
    return Plan(tuple(planned), received, peers)
