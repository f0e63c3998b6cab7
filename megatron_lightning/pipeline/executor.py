"""Run a schedule's table on this rank. The executor decides nothing: order is the table's, computation the program's.

What it adds is messages and memory. Receives are posted a little ahead and sends never wait; a stage's output is let go
once it is sent, since its backward needs the graph (through a gradient edge) and not the values; buffers live from the
message to the backward of one micro-batch, whatever the number of micro-batches.

Shapes may differ from micro-batch to micro-batch. The program gives each one a *signature*, equal on all stages; the
first message of a signature on a boundary carries a header, later ones are received into buffers of the known shapes.
"""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_lightning.errors import PipelineError
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.pipeline.actions import Action, Kind, Placement, Schedule
from megatron_lightning.pipeline.channel import Boundary, Inbox, Outbox, Transport, describe, encode_header
from megatron_lightning.pipeline.schedules import forward_only

_log = logging.getLogger(__name__)

_WINDOW = 2  # messages received ahead on a channel: one in use by the wire, one ready for the next action


class StageProgram(Protocol):
    """What the stages of this rank compute."""

    def forward(self, stage: int, microbatch: int, received: tuple[Tensor, ...] | None) -> tuple[Tensor, ...] | Tensor | None:
        """Run one stage on one micro-batch.

        Args:
            stage: Global stage.
            microbatch: Index in the step.
            received: Outputs of the stage before; None on stage 0.

        Returns:
            The tensors for the next stage; on the last stage the scalar to back-propagate, or None.
        """
        ...

    def signature(self, microbatch: int) -> Hashable:
        """Return what decides the shapes and dtypes between stages; equal on all stages."""
        ...

    def before_last_backward(self, stage: int) -> None:
        """Be told that the step's last backward of ``stage`` comes next: its gradients may be reduced as they appear."""
        ...


@dataclass(frozen=True)
class PipelinePosition:
    """Where in a pipeline step an error was raised; such an error carries it as ``pipeline_position``."""

    rank: int
    """Global rank."""
    coordinate: int
    """Pipeline coordinate."""
    action: Action

    def __str__(self) -> str:
        return (
            f"rank {self.rank} (pp rank {self.coordinate}) was at stage {self.action.stage}, action {self.action}, "
            f"micro-batch {self.action.microbatch}"
        )


_BoundaryKey = tuple[int, bool, Hashable]


class PipelineExecutor:
    """Runs schedules on the pipeline of one context.

    Creating it is collective over the pipeline group.

    Args:
        context: Groups of this rank.
        placement: Where the stages live.

    Raises:
        ConfigError: If the placement is for another number of pipeline ranks.
    """

    def __init__(self, context: ParallelContext, placement: Placement) -> None:
        self.context, self.placement = context, placement
        self.transport = Transport(context, placement)
        self.boundaries: dict[_BoundaryKey, Boundary] = {}
        """Tensors that each (receiving stage, backward, signature) has been found to take."""

    def warm_up(self) -> None:
        """Make every communicator exist before the first step; collective over the pipeline group."""
        self.transport.warm_up()

    def forget_boundaries(self) -> None:
        """Forget the shapes learnt so far, on all ranks of the pipeline together.

        To be called when the same signature may from now on mean something else, such as after layers were frozen or
        unfrozen; the next step sends headers again.
        """
        self.boundaries.clear()

    def run(self, schedule: Schedule, program: StageProgram, *, backward: bool = True) -> None:
        """Run one step.

        Args:
            schedule: A valid table on this executor's placement.
            program: What the stages compute; called in the order of the table.
            backward: Whether to run backwards; False runs the table's forwards alone, in their order.

        Raises:
            PipelineError: If the table does not fit, or a stage hands on something else than it promised.
            Exception: Whatever the program raises, with the position in the schedule added.
        """
        if schedule.placement != self.placement:
            raise PipelineError(
                f"schedule {schedule.name} is for the placement {schedule.placement.coordinates}, and this pipeline has "
                f"{self.placement.coordinates}. Make the schedule for this pipeline."
            )
        table = schedule if backward else forward_only(schedule)
        _Step(self, table, program, backward).run()


@dataclass
class _InFlight:
    """What a stage keeps of one micro-batch from its forward to its backward."""

    inputs: tuple[Tensor, ...]
    """Received tensors that take a gradient."""
    edges: tuple[GradientEdge, ...]
    """Where the gradients of the outputs enter the graph; the outputs themselves are gone."""
    output_gradients: Boundary
    """What the next stage will send for them."""
    seed: tuple[Tensor, ...] = ()
    """The loss's own gradient, on the last stage."""


class _Step:
    """One run of a table; also the book in which its inboxes look up what arrives."""

    def __init__(self, executor: PipelineExecutor, schedule: Schedule, program: StageProgram, backward: bool) -> None:
        self._context, self._boundaries = executor.context, executor.boundaries
        self._schedule, self._program, self._backward = schedule, program, backward
        context, transport = executor.context, executor.transport
        self._coordinate, self._holders = context.pp.rank, schedule.placement.coordinates
        self._last_stage = schedule.placement.num_stages - 1
        self._actions = schedule.actions[self._coordinate]
        self._signatures = [program.signature(microbatch) for microbatch in range(schedule.num_microbatches)]
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._local: dict[Action, tuple[Tensor, ...]] = {}
        expected: dict[tuple[Kind, int], list[Action]] = defaultdict(list)
        self._last_backward: dict[int, Action] = {}
        for action in self._actions:
            if action.kind is Kind.BACKWARD:
                self._last_backward[action.stage] = action
            elif action.kind is not Kind.FORWARD:
                raise PipelineError(
                    f"schedule {schedule.name} has action {action}, and backwards are not split here. Use whole backwards (B)."
                )
            source = self._source(action)
            if source is not None and source != self._coordinate:
                expected[action.kind, source].append(action)
        self._inboxes = {
            (kind, source): Inbox(transport, source, actions, self, window=_WINDOW)
            for (kind, source), actions in expected.items()
        }
        neighbours = {stage + hop for stage in schedule.placement.stages_of(self._coordinate) for hop in (-1, 1)}
        peers = {self._holders[stage] for stage in neighbours if 0 <= stage <= self._last_stage} - {self._coordinate}
        self._outboxes = {peer: Outbox(transport, peer) for peer in peers}

    def run(self) -> None:
        """Execute this coordinate's actions, then wait until everything sent has arrived."""
        action = self._actions[0]
        try:
            for action in self._actions:
                for inbox in self._inboxes.values():
                    inbox.refill()
                for outbox in self._outboxes.values():
                    outbox.release()
                if action.kind is Kind.FORWARD:
                    self._forward(action)
                else:
                    self._backward_of(action)
            for outbox in self._outboxes.values():
                outbox.finish()
        except Exception as error:
            _locate(error, PipelinePosition(self._context.rank, self._coordinate, action))
            raise

    def _forward(self, action: Action) -> None:
        stage, _, microbatch = action
        received = self._received(action)
        outputs = self._program.forward(stage, microbatch, received)
        # Only what can take a gradient is kept; the rest of the input lives as long as the graph needs it.
        inputs = tuple(tensor for tensor in received or () if tensor.requires_grad)
        flight = self._end(outputs, inputs) if stage == self._last_stage else self._hand_on(action, outputs, inputs)
        if self._backward:
            self._in_flight[stage, microbatch] = flight

    def _received(self, action: Action) -> tuple[Tensor, ...] | None:
        """Return the outputs of the stage before, as leaves of this stage's graph."""
        if action.stage == 0:
            return None
        tensors = self._take(action)
        if self._backward:
            for tensor, meta in zip(tensors, self._boundaries[self._key(action)], strict=True):
                if meta.requires_grad:
                    tensor.requires_grad_()
        return tensors

    def _end(self, loss: object, inputs: tuple[Tensor, ...]) -> _InFlight:
        if loss is None:
            return _InFlight(inputs, (), ())
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise PipelineError(
                f"the last stage returned {_kind_of(loss)}; a backward starts from one number. Return a scalar tensor, or None "
                "for no backward."
            )
        if not (self._backward and loss.requires_grad):
            return _InFlight(inputs, (), ())
        return _InFlight(inputs, (get_gradient_edge(loss),), (), (torch.ones_like(loss),))

    def _hand_on(self, action: Action, outputs: object, inputs: tuple[Tensor, ...]) -> _InFlight:
        """Send a stage's outputs to the next stage and keep no more of them than their place in the graph."""
        tensors = (outputs,) if isinstance(outputs, Tensor) else outputs
        if not isinstance(tensors, tuple) or not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise PipelineError(
                f"stage {action.stage} returned {_kind_of(outputs)}; only tensors travel between stages. Return a tensor or a "
                "tuple of tensors."
            )
        boundary = describe(tensors, backward=self._backward)
        taker = Action(action.stage + 1, Kind.FORWARD, action.microbatch)
        self._send(taker, self._with_header(taker, boundary, tensors))
        edges = tuple(get_gradient_edge(tensor) for tensor, meta in zip(tensors, boundary, strict=True) if meta.requires_grad)
        return _InFlight(inputs, edges, tuple(meta for meta in boundary if meta.requires_grad))

    def _with_header(self, taker: Action, boundary: Boundary, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Put a header before the first message of a signature; check that later ones are as it said."""
        key = self._key(taker)
        known = self._boundaries.setdefault(key, boundary)
        if known != boundary:
            promised, found = (", ".join(map(str, metas)) for metas in (known, boundary))
            raise PipelineError(
                f"stage {taker.stage - 1} hands on {found} for micro-batch {taker.microbatch}, and an earlier micro-batch with "
                f"the same signature {key[-1]!r} had {promised}; the next stage has posted buffers for that. Let the signature "
                "tell the two apart, or call forget_boundaries() on all ranks after layers are frozen or unfrozen."
            )
        remote = self._holders[taker.stage] != self._coordinate
        if known is boundary and remote:
            return (encode_header(boundary, self._context.device), *tensors)
        return tensors

    def _backward_of(self, action: Action) -> None:
        stage, _, microbatch = action
        flight = self._in_flight.pop((stage, microbatch))
        gradients = flight.seed if stage == self._last_stage else self._take(action)
        if self._last_backward[stage] == action:
            self._program.before_last_backward(stage)
        if flight.edges:
            torch.autograd.backward(flight.edges, gradients)
        if stage > 0:
            # An input that nothing used has no gradient, and the stage before waits for one.
            inputs = flight.inputs
            grads = tuple(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in inputs)
            self._send(Action(stage - 1, Kind.BACKWARD, microbatch), grads)

    def _source(self, action: Action) -> int | None:
        """Return the coordinate that an action takes a message from; None at the ends of the pipeline."""
        giver = action.stage + (-1 if action.kind is Kind.FORWARD else 1)
        return self._holders[giver] if 0 <= giver <= self._last_stage else None

    def _send(self, taker: Action, tensors: tuple[Tensor, ...]) -> None:
        """Give tensors to the stage whose action takes them."""
        destination = self._holders[taker.stage]
        if destination == self._coordinate:
            self._local[taker] = tuple(tensor.detach() for tensor in tensors)
        else:
            consumed_at = self._schedule.positions[taker]
            self._outboxes[destination].send(taker.kind, tensors, self.tag(taker), consumed_at)

    def _take(self, action: Action) -> tuple[Tensor, ...]:
        """Return the message that an action waits for."""
        source = self._source(action)
        if source is None or source == self._coordinate:
            return self._local.pop(action)
        tensors = self._inboxes[action.kind, source].take()
        if tensors:
            giver = Action(action.stage + (-1 if action.kind is Kind.FORWARD else 1), action.kind, action.microbatch)
            self._outboxes[source].release(self._schedule.positions[giver])
        return tensors

    def _key(self, action: Action) -> _BoundaryKey:
        return action.stage, self._backward, self._signatures[action.microbatch]

    def expected(self, action: Action) -> Boundary | None:
        """Return what an action will receive; None: not known before its header, or before its forward."""
        if action.kind is Kind.FORWARD:
            return self._boundaries.get(self._key(action))
        flight = self._in_flight.get((action.stage, action.microbatch))
        return None if flight is None else flight.output_gradients

    def learn(self, action: Action, boundary: Boundary) -> None:
        """Take note of what a header said."""
        self._boundaries[self._key(action)] = boundary

    def tag(self, action: Action) -> int:
        """Return the tag of the message that an action receives."""
        return action.stage * self._schedule.num_microbatches + action.microbatch


def _kind_of(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(item).__name__ for item in value) or 'nothing'}"
    return type(value).__name__


def _locate(error: Exception, position: PipelinePosition) -> None:
    """Add the position to an error of any type, which stays what it is."""
    vars(error)["pipeline_position"] = position
    if sys.version_info >= (3, 11):
        error.add_note(str(position))
    else:
        _log.error("%s: %s", type(error).__name__, position)
