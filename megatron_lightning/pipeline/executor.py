"""Run a schedule's table on this rank. The executor decides nothing: order is the table's, computation the program's.

What it adds is messages and memory. Receives are posted a little ahead, and sends wait only where more would be under way than
the schedule foresees. A stage's output is let go once it is sent, since its backward needs the graph (through a gradient edge)
and not the values; buffers live from the message to the backward of one micro-batch, whatever the number of micro-batches.

A split backward walks the graph once, in its first half (I); layers that can put off the gradients of their weights do so,
and the second half (W) computes them. What cannot be put off is computed in the first half.

Shapes may differ from micro-batch to micro-batch. The program gives each one a *signature*, equal on all stages; the
first message of a signature on a boundary carries a header, later ones are received into buffers of the known shapes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_lightning import compat
from megatron_lightning.errors import PipelineError
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.pipeline.actions import Action, Kind, Placement, Schedule
from megatron_lightning.pipeline.channel import Boundary, Inbox, Outbox, Transport, describe, encode_header
from megatron_lightning.pipeline.plan import Message, Plan, Planned, plan_of
from megatron_lightning.pipeline.schedules import forward_only
from megatron_lightning.pipeline.timeline import Timeline
from megatron_lightning.pipeline.weight_gradients import WeightGradients

_log = logging.getLogger(__name__)

_WINDOW = 2  # messages received ahead on a channel: one in use by the wire, one ready for the next action


class StageProgram(Protocol):
    """What the stages of this rank compute."""

    def forward(self, stage: int, microbatch: int, received: tuple[Tensor, ...] | None) -> tuple[Tensor, ...] | Tensor | None:
        """Run one stage on one micro-batch.

        Args:
            stage: Global stage.
            microbatch: Index in the step.
            received: Outputs of the stage before, which may be changed in place; None on stage 0.

        Returns:
            The tensors for the next stage; on the last stage the scalar to back-propagate, or None.
        """
        ...

    def signature(self, microbatch: int) -> Hashable:
        """Return what decides the shapes and dtypes between stages; equal on all stages."""
        ...

    def completing(self, stage: int) -> AbstractContextManager[None]:
        """Return what to put around the action that completes the gradients of ``stage`` in this step.

        Gradients that appear inside are final, and so are all of the stage's after it: their reduction may start.
        """
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


class _Entrance(torch.autograd.Function):
    """A received tensor as its stage sees it: no leaf, since a leaf that takes a gradient may not be changed in place."""

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return received.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _enter(received: Tensor) -> Tensor:
    entered: Tensor = _Entrance.apply(received)  # type: ignore[no-untyped-call]
    return entered


_BoundaryKey = tuple[int, bool, int]
_Place = tuple[int, int]  # stage and micro-batch


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
        """Tensors that each (receiving stage, backward, number of the signature) has been found to take."""
        self._numbers: dict[Hashable, int] = {}  # of the signatures, which may be long to compare
        self.weight_gradients = WeightGradients()
        """Where layers put off the gradients of their weights while a backward is split."""
        self.timeline: Timeline | None = None
        """Records when each action ran, if set."""
        self.current: Action | None = None
        """The action that runs now, or ran last; None before the first step."""
        self._plans: dict[tuple[int, bool], tuple[Schedule, Plan]] = {}

    def warm_up(self) -> None:
        """Make every communicator exist before the first step; collective over the pipeline group."""
        self.transport.warm_up()

    def forget_boundaries(self) -> None:
        """Forget the shapes learnt so far, on all ranks of the pipeline together.

        To be called when the same signature may from now on mean something else, such as after layers were frozen or
        unfrozen; the next step sends headers again.
        """
        self.boundaries.clear()
        self._numbers.clear()

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
        numbers = self._numbers
        shapes = [
            numbers.setdefault(program.signature(microbatch), len(numbers)) for microbatch in range(schedule.num_microbatches)
        ]
        _Run(self, self._plan(schedule, backward), program, shapes, backward).run()

    def _plan(self, schedule: Schedule, backward: bool) -> Plan:
        """Return this rank's plan, made once for each table (which the cache keeps, so that its id stays its own)."""
        key = (id(schedule), backward)
        if key not in self._plans:
            table = schedule if backward else forward_only(schedule)
            self._plans[key] = (schedule, plan_of(table, self.context.pp.rank))
        return self._plans[key][1]


@dataclass(slots=True)
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


class _Run:
    """One run of a plan; also the book in which its inboxes look up what arrives."""

    def __init__(
        self,
        executor: PipelineExecutor,
        plan: Plan,
        program: StageProgram,
        shapes: list[int],
        backward: bool,
    ) -> None:
        self._executor, self._plan, self._program, self._backward = executor, plan, program, backward
        self._boundaries, self._shapes, self._timeline = executor.boundaries, shapes, executor.timeline
        self._weight_gradients = executor.weight_gradients
        self._in_flight: dict[_Place, _InFlight] = {}
        self._local: dict[tuple[bool, int, int], tuple[Tensor, ...]] = {}
        self._inboxes = {
            channel: Inbox(executor.transport, *channel, messages, self, window=_WINDOW)
            for channel, messages in plan.received.items()
        }
        self._outboxes = {peer: Outbox(executor.transport, peer) for peer in plan.peers}

    def run(self) -> None:
        """Execute this coordinate's actions, then wait until everything sent has arrived."""
        planned, timeline, executor = self._plan.actions[0], self._timeline, self._executor
        self._weight_gradients.begin()
        try:
            for inbox in self._inboxes.values():
                inbox.refill()
            for planned in self._plan.actions:
                received = None if planned.takes is None else self._take(planned.takes)
                executor.current = planned.action
                if timeline is not None:
                    timeline.begin(planned.action)
                if planned.completes:
                    with self._program.completing(planned.action.stage):
                        self._execute(planned, received)
                else:
                    self._execute(planned, received)
                if timeline is not None:
                    timeline.end()
            for outbox in self._outboxes.values():
                outbox.finish()
        except Exception as error:
            self._weight_gradients.clear()
            context = executor.context
            _locate(error, PipelinePosition(context.rank, context.pp.rank, planned.action))
            raise

    def _execute(self, planned: Planned, received: tuple[Tensor, ...] | None) -> None:
        stage, kind, microbatch = planned.action
        if kind is Kind.FORWARD:
            self._forward(planned, received)
        elif kind is Kind.WEIGHT_GRADIENT:
            self._weight_gradients.compute((stage, microbatch))
        else:
            self._backward_of(planned, received)

    def _forward(self, planned: Planned, received: tuple[Tensor, ...] | None) -> None:
        stage, _, microbatch = planned.action
        # Only what can take a gradient is kept; the rest of the input lives as long as the graph needs it.
        inputs: tuple[Tensor, ...] = ()
        if received is not None and self._backward:
            boundary = self._boundaries[self._key(stage, microbatch)]
            inputs = tuple([t.requires_grad_() for t, meta in zip(received, boundary, strict=True) if meta.requires_grad])
            received = tuple([_enter(tensor) if tensor.requires_grad else tensor for tensor in received])
        outputs = self._program.forward(stage, microbatch, received)
        flight = self._end(outputs, inputs) if planned.gives is None else self._hand_on(planned.gives, outputs, inputs)
        if self._backward:
            self._in_flight[stage, microbatch] = flight
            if planned.gives is not None and planned.gives.peer is not None:
                self._inboxes[False, planned.gives.peer].refill()  # the shapes of its gradients are known now

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

    def _hand_on(self, message: Message, outputs: object, inputs: tuple[Tensor, ...]) -> _InFlight:
        """Send a stage's outputs to the next stage and keep no more of them than their place in the graph."""
        tensors = (outputs,) if isinstance(outputs, Tensor) else outputs
        if not isinstance(tensors, tuple) or not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise PipelineError(
                f"stage {message.stage - 1} returned {_kind_of(outputs)}; only tensors travel between stages. Return a tensor "
                "or a tuple of tensors."
            )
        boundary = describe(tensors, backward=self._backward)
        self._send(message, self._with_header(message, boundary, tensors))
        edges = tuple(get_gradient_edge(tensor) for tensor, meta in zip(tensors, boundary, strict=True) if meta.requires_grad)
        return _InFlight(inputs, edges, tuple(meta for meta in boundary if meta.requires_grad))

    def _with_header(self, message: Message, boundary: Boundary, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Put a header before the first message of a signature; check that later ones are as it said."""
        key = self._key(message.stage, message.microbatch)
        is_new = key not in self._boundaries
        known = self._boundaries.setdefault(key, boundary)
        if known != boundary:
            promised, found = (", ".join(map(str, metas)) or "nothing" for metas in (known, boundary))
            signature = self._program.signature(message.microbatch)
            raise PipelineError(
                f"stage {message.stage - 1} hands on {found} for micro-batch {message.microbatch}, and an earlier micro-batch "
                f"with the same signature {signature!r} had {promised}; the next stage has posted buffers for that. Where "
                "shapes follow from values in a batch, or layers are frozen within an epoch, set variable_seq_lengths of "
                "pipeline_options; a program of your own lets its signature tell the two apart, or calls forget_boundaries()."
            )
        if is_new and message.peer is not None:
            return (encode_header(boundary, self._executor.context.device), *tensors)
        return tensors

    def _backward_of(self, planned: Planned, received: tuple[Tensor, ...] | None) -> None:
        stage, kind, microbatch = planned.action
        flight = self._in_flight.pop((stage, microbatch))
        gradients = flight.seed if received is None else received
        with self._weight_gradients.collect((stage, microbatch)):
            if flight.edges:
                compat.run_backward(flight.edges, gradients)
        if planned.gives is not None:
            # An input that nothing used has no gradient, and the stage before waits for one.
            inputs = flight.inputs
            self._send(planned.gives, tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in inputs))
        if kind is Kind.BACKWARD:
            self._weight_gradients.compute((stage, microbatch))

    def _send(self, message: Message, tensors: tuple[Tensor, ...]) -> None:
        """Give tensors to the stage that takes them."""
        if message.peer is None:
            self._local[message[:3]] = tuple(tensor.detach() for tensor in tensors)
        else:
            self._outboxes[message.peer].send(message, tensors)

    def _take(self, message: Message) -> tuple[Tensor, ...]:
        """Return a message when it is there, and receive the next ones behind it."""
        if message.peer is None:
            return self._local.pop(message[:3])
        inbox = self._inboxes[message.forward, message.peer]
        tensors = inbox.take()
        inbox.refill()
        if tensors:
            self._outboxes[message.peer].release(message.peer_position)
        return tensors

    def _key(self, stage: int, microbatch: int) -> _BoundaryKey:
        return stage, self._backward, self._shapes[microbatch]

    def expected(self, message: Message) -> Boundary | None:
        """Return what a message consists of; None: not known before its header, or before its stage's forward."""
        if message.forward:
            return self._boundaries.get(self._key(message.stage, message.microbatch))
        flight = self._in_flight.get((message.stage, message.microbatch))
        return None if flight is None else flight.output_gradients

    def learn(self, message: Message, boundary: Boundary) -> None:
        """Take note of what a header said."""
        self._boundaries[self._key(message.stage, message.microbatch)] = boundary


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
