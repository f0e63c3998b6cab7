"""A pp rank's part of a schedule: the rank's actions, with all messages looked up in advance. No
torch here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from megatron_lightning.pipeline.schedules.actions import SENDS_GRADIENT, Action, Kind, Schedule
from megatron_lightning.pipeline.schedules.simulate import simulate

_SLACK = 2  # messages. Stages are never as even as on paper


class Message(NamedTuple):
    """Tensors between two neighboring stages, seen from either end."""

    forward: bool
    """Direction in the model: outputs go forward, their gradients backward."""
    stage: int
    """Stage that takes the tensors."""
    microbatch: int
    peer: int | None
    """Pipeline rank at the other end. None: both stages are here."""
    peer_position: int
    """Position, in the peer's list, of the action at the other end."""
    tag: int
    """Unique among the messages of a direction in the run."""
    ahead: int = 0
    """For the sender: how many earlier messages of the channel may still be in flight."""


class Planned(NamedTuple):
    """Action with the taken and the given message. None at the ends of the pipeline and for weight
    gradients.
    """

    action: Action
    takes: Message | None
    gives: Message | None
    completes: bool
    """Whether the gradients of the action's stage are complete after the action."""


@dataclass(frozen=True)
class Plan:
    """A pp rank's part of a schedule."""

    actions: tuple[Planned, ...]
    """Actions in the order of execution."""
    received: Mapping[tuple[bool, int], Sequence[Message]]
    """(direction in the model, peer) -> messages that arrive on the channel, in order."""
    peers: Set[int]
    """Pipeline ranks that exchange messages with this rank."""


def plan_of(schedule: Schedule, pp_rank: int) -> Plan:
    """Return the actions of a pp rank with the actions' messages."""
    messages, row = _Messages(schedule, pp_rank), schedule.actions[pp_rank]
    last_of_stage = {
        action.stage: action
        for action in row
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)
    }
    planned = [
        Planned(action, *messages.of(action), last_of_stage.get(action.stage) == action)
        for action in row
    ]
    receives: dict[tuple[bool, int], list[Message]] = {}
    peers = set()
    for _, takes, gives, _ in planned:
        if takes is not None and takes.peer is not None:
            receives.setdefault((takes.forward, takes.peer), []).append(takes)
        peers |= {end.peer for end in (takes, gives) if end is not None and end.peer is not None}
    return Plan(tuple(planned), receives, peers)


class _Messages:
    """The messages of a pp rank's actions, to be asked for in the actions' order."""

    def __init__(self, schedule: Schedule, pp_rank: int) -> None:
        self._schedule = schedule
        self._pp_rank = pp_rank
        self._spans = simulate(schedule).spans
        self._taken_at: dict[tuple[bool, int], list[float]] = {}

    def of(self, action: Action) -> tuple[Message | None, Message | None]:
        """Return the messages that an action takes and gives."""
        stage, kind, microbatch = action
        if kind is Kind.WEIGHT_GRADIENT:
            return None, None
        forward = kind is Kind.FORWARD
        hop = 1 if forward else -1
        takes = self._message(forward, stage, stage - hop, microbatch)
        gives = self._message(forward, stage + hop, stage + hop, microbatch)
        return takes, gives and self._bounded(gives, action)

    def _message(
        self, forward: bool, taker: int, peer_stage: int, microbatch: int
    ) -> Message | None:
        """Return the message that stage ``taker`` takes. None: either end is no stage."""
        placement = self._schedule.placement
        if min(taker, peer_stage) < 0 or max(taker, peer_stage) >= placement.num_stages:
            return None
        holder = placement.pp_ranks[peer_stage]
        return Message(
            forward,
            taker,
            microbatch,
            peer=holder if holder != self._pp_rank else None,
            peer_position=self._position(forward, peer_stage, microbatch),
            tag=taker * self._schedule.num_microbatches + microbatch,
        )

    def _position(self, forward: bool, stage: int, microbatch: int) -> int:
        """Return the position, on the peer rank, of the action at the other end of a message."""
        kinds, positions = (Kind.FORWARD,) if forward else SENDS_GRADIENT, self._schedule.positions
        return next(
            positions[action]
            for kind in kinds
            if (action := Action(stage, kind, microbatch)) in positions
        )

    def _bounded(self, gives: Message, action: Action) -> Message:
        """Limit the earlier messages in flight: as many as in the simulation, plus a slack.

        A sender beyond the limit waits for an action with an earlier start in the simulation, so
        there is no circle.
        """
        if gives.peer is None:
            return gives
        taken_before = self._taken_at.setdefault((gives.forward, gives.peer), [])
        ahead = len(taken_before) - bisect_left(taken_before, self._spans[action][0]) + _SLACK
        taken_by = self._schedule.actions[gives.peer][gives.peer_position]
        taken_before.append(self._spans[taken_by][0])
        return gives._replace(ahead=ahead)
