"""A pass of a schedule on this rank: messages, and memory between forward and backward.

Receives are posted a little ahead, and sends wait only if more would be in flight than the schedule
foresees. A stage's output is released after sending, since the stage's backward needs the graph
(through a gradient edge) and not the values. Buffers live from the message to the backward of a
micro-batch, whatever the number of micro-batches.

A split backward walks the graph once, in the first half (I). Layers able to defer weight gradients
do so, and the second half (W) computes the deferred gradients. Other weight gradients are computed
in the first half.

Shapes may differ from micro-batch to micro-batch. The program gives each micro-batch a *signature*,
equal on all stages. The first message of a signature on a boundary carries a header. Later messages
are received into buffers of the known shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_lightning import compat
from megatron_lightning.errors import PipelineError
from megatron_lightning.pipeline.channel import (
    Boundary,
    Inbox,
    Outbox,
    StageTensors,
    Transport,
    describe,
    encode_header,
)
from megatron_lightning.pipeline.message_plan import Message, Plan, Planned
from megatron_lightning.pipeline.schedules.actions import Kind
from megatron_lightning.pipeline.weight_gradients import WeightGradients

BoundaryKey = tuple[int, bool, int]
"""Receiving stage, whether there is a backward, and number of the signature."""


class StageProgram(Protocol):
    """Computation of the stages of this rank."""

    def forward(
        self, stage: int, microbatch: int, received: StageTensors | None
    ) -> tuple[Tensor, ...] | Tensor | None:
        """Run a stage on a micro-batch.

        Args:
            stage: Global stage.
            microbatch: Index in the step.
            received: Outputs of the stage before, safe to modify in place. None on stage 0.

        Returns:
            The tensors for the next stage, with a note in :class:`StageTensors`. On the last stage
            the scalar to back-propagate, or None.
        """
        ...

    def recomputing(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Return the context for the backward of a stage, since a backward may recompute the
        forward.
        """
        ...

    def signature(self, microbatch: int) -> Hashable:
        """Return a key of the shapes and dtypes between stages, equal on all stages."""
        ...

    def completing(self, stage: int) -> AbstractContextManager[None]:
        """Return the context for the action that completes the gradients of ``stage`` in this run.

        Gradients that appear inside are final, and all of the stage's gradients are final after the
        context: reduction may start.
        """
        ...


class Signatures:
    """Numbers of the micro-batches' signatures in a run.

    Args:
        number_of: Returns the number of a micro-batch's signature. Called once for each
            micro-batch.
        known: Micro-batches with signatures to ask for now.
    """

    def __init__(self, number_of: Callable[[int], int], known: Iterable[int]) -> None:
        self._number_of = number_of
        self._numbers: dict[int, int] = {}
        for microbatch in known:
            self.ask(microbatch)

    def ask(self, microbatch: int) -> None:
        """Ask for the signature of a micro-batch, unless known."""
        if microbatch not in self._numbers:
            self._numbers[microbatch] = self._number_of(microbatch)

    def get(self, microbatch: int) -> int | None:
        """Return the number of a signature. None: not known yet."""
        return self._numbers.get(microbatch)


class _Entrance(torch.autograd.Function):
    """Make a non-leaf of a received tensor: a leaf that takes a gradient may not be modified in
    place.
    """

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return received.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@dataclass(slots=True)
class _InFlight:
    """State of a micro-batch on a stage from forward to backward."""

    inputs: tuple[Tensor, ...]
    """Received tensors that take a gradient."""
    edges: tuple[GradientEdge, ...]
    """Graph nodes for the gradients of the outputs. The outputs themselves are released."""
    output_gradients: Boundary
    """Metadata of the gradients from the next stage."""
    seed: tuple[Tensor, ...] = ()
    """Gradient of the loss itself, on the last stage."""


class PipelineRun:
    """A run of a plan, and the :class:`BoundaryBook` of the run's inboxes.

    Args:
        plan: Actions and messages of this rank.
        program: Computation of the stages.
        signatures: Numbers of the micro-batches' signatures.
        transport: Process groups of the pipeline.
        boundaries: Known metadata of the tensors received by stages. The run adds metadata.
        weight_gradients: Store of deferred weight gradients.
        backward: Whether the plan has backwards.
    """

    def __init__(
        self,
        plan: Plan,
        program: StageProgram,
        signatures: Signatures,
        *,
        transport: Transport,
        boundaries: dict[BoundaryKey, Boundary],
        weight_gradients: WeightGradients,
        backward: bool,
    ) -> None:
        self._program = program
        self.signatures = signatures
        """Numbers of the micro-batches' signatures."""
        self._device = transport.device
        self._boundaries = boundaries
        self._weight_gradients = weight_gradients
        self._backward = backward
        self._in_flight: dict[tuple[int, int], _InFlight] = {}  # by stage and micro-batch
        self._local: dict[tuple[bool, int, int], tuple[Tensor, ...]] = {}
        self._inboxes = {
            channel: Inbox(transport, *channel, messages, self)
            for channel, messages in plan.received.items()
        }
        self._outboxes = {peer: Outbox(transport, peer) for peer in plan.peers}

    def start(self) -> None:
        """Post the first receives."""
        for inbox in self._inboxes.values():
            inbox.refill()

    def finish(self) -> None:
        """Wait for all sends."""
        for outbox in self._outboxes.values():
            outbox.finish()

    def forward(
        self, planned: Planned, received: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, ...] | Tensor | None:
        """Run a stage on the received tensors, and send the outputs."""
        stage, _, microbatch = planned.action
        # Keep only inputs that take a gradient. Other inputs live as long as the graph needs the
        # inputs.
        inputs: tuple[Tensor, ...] = ()
        stage_input: StageTensors | None = None
        if received is not None:
            boundary = self._boundaries[self._key(stage, microbatch)]
            if self._backward:
                inputs = tuple(
                    [
                        t.requires_grad_()
                        for t, meta in zip(received, boundary.tensors, strict=True)
                        if meta.requires_grad
                    ]
                )
                enter: Callable[[Tensor], Tensor] = _Entrance.apply
                received = tuple(
                    [enter(tensor) if tensor.requires_grad else tensor for tensor in received]
                )
            stage_input = StageTensors(received, boundary.note)
        outputs = self._program.forward(stage, microbatch, stage_input)
        flight = (
            self._end(outputs, inputs)
            if planned.gives is None
            else self._send_outputs(planned.gives, outputs, inputs)
        )
        if self._backward:
            self._in_flight[stage, microbatch] = flight
            if planned.gives is not None and planned.gives.peer is not None:
                # The shapes of the message's gradients are known now.
                self._inboxes[False, planned.gives.peer].refill()
        return outputs

    def _end(self, loss: object, inputs: tuple[Tensor, ...]) -> _InFlight:
        if loss is None:
            return _InFlight(inputs, (), Boundary(()))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise PipelineError(
                f"the last stage returned {_kind_of(loss)}; a backward starts from one number. "
                "Return a scalar tensor, or None for no backward."
            )
        if not (self._backward and loss.requires_grad):
            return _InFlight(inputs, (), Boundary(()))
        seed = (torch.ones_like(loss),)
        return _InFlight(inputs, (get_gradient_edge(loss),), Boundary(()), seed)

    def _send_outputs(
        self, message: Message, outputs: object, inputs: tuple[Tensor, ...]
    ) -> _InFlight:
        """Send a stage's outputs to the next stage, and keep only their gradient edges."""
        tensors = (outputs,) if isinstance(outputs, Tensor) else outputs
        if not isinstance(tensors, tuple) or not all(
            isinstance(tensor, Tensor) for tensor in tensors
        ):
            raise PipelineError(
                f"stage {message.stage - 1} returned {_kind_of(outputs)}; only tensors travel "
                "between stages. Return a tensor or a tuple of tensors."
            )
        boundary = describe(tensors, backward=self._backward)
        self._send(message, self._with_header(message, boundary, tensors))
        edges = tuple(
            get_gradient_edge(tensor)
            for tensor, meta in zip(tensors, boundary.tensors, strict=True)
            if meta.requires_grad
        )
        gradients = tuple(meta for meta in boundary.tensors if meta.requires_grad)
        return _InFlight(inputs, edges, Boundary(gradients))

    def _with_header(
        self, message: Message, boundary: Boundary, tensors: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Put a header before the first message of a signature. Check that later messages match the
        header.
        """
        key = self._key(message.stage, message.microbatch)
        is_new = key not in self._boundaries
        known_boundary = self._boundaries.setdefault(key, boundary)
        if known_boundary != boundary:
            signature = self._program.signature(message.microbatch)
            raise PipelineError(
                f"stage {message.stage - 1} sends {boundary} for micro-batch {message.microbatch}, "
                f"and an earlier micro-batch with the same signature {signature!r} had "
                f"{known_boundary}; the next stage has posted buffers for that. Where "
                "shapes follow from values in a batch, or layers are frozen within an epoch, set "
                "variable_seq_lengths of pipeline_options; your own program returns different "
                "signatures for the two, or calls forget_boundaries()."
            )
        if is_new and message.peer is not None:
            return (*encode_header(boundary, self._device), *tensors)
        return tensors

    def backward(self, planned: Planned, received: tuple[Tensor, ...] | None) -> None:
        """Compute the gradients of a stage's inputs from the gradients of the stage's outputs and
        send the gradients (B, I). Compute the deferred weight gradients (B, W).
        """
        stage, kind, microbatch = planned.action
        if kind is not Kind.WEIGHT_GRADIENT:
            flight = self._in_flight.pop((stage, microbatch))
            gradients = flight.seed if received is None else received
            with (
                self._weight_gradients.collect((stage, microbatch)),
                self._program.recomputing(stage, microbatch),
            ):
                if flight.edges:
                    compat.run_backward(flight.edges, gradients)
            if planned.gives is not None:
                # The stage before waits for a gradient of an unused input too.
                zeros_or_grad = (
                    torch.zeros_like(t) if t.grad is None else t.grad for t in flight.inputs
                )
                self._send(planned.gives, tuple(zeros_or_grad))
        if kind is not Kind.INPUT_GRADIENT:
            self._weight_gradients.compute((stage, microbatch))

    def _send(self, message: Message, tensors: tuple[Tensor, ...]) -> None:
        """Send tensors to the stage that takes the tensors, possibly on this rank."""
        if message.peer is None:
            self._local[message[:3]] = tuple(tensor.detach() for tensor in tensors)
        else:
            self._outboxes[message.peer].send(message, tensors)

    def take(self, message: Message | None) -> tuple[Tensor, ...] | None:
        """Wait for a message and post the receives behind the message. None if an action takes
        none.
        """
        if message is None:
            return None
        if message.peer is None:
            return self._local.pop(message[:3])
        inbox = self._inboxes[message.forward, message.peer]
        tensors = inbox.take()
        inbox.refill()
        if tensors:
            self._outboxes[message.peer].release(message.peer_position)
        return tensors

    def _key(self, stage: int, microbatch: int) -> BoundaryKey:
        number = self.signatures.get(microbatch)
        return stage, self._backward, -1 if number is None else number  # -1: no boundary's

    def expected(self, message: Message) -> Boundary | None:
        """Return the metadata of a message. None: not known before the message's header, or before
        the stage's forward.
        """
        if message.forward:
            return self._boundaries.get(self._key(message.stage, message.microbatch))
        flight = self._in_flight.get((message.stage, message.microbatch))
        return None if flight is None else flight.output_gradients

    def record(self, message: Message, boundary: Boundary) -> None:
        """Record the metadata of a header."""
        self._boundaries[self._key(message.stage, message.microbatch)] = boundary


def _kind_of(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(item).__name__ for item in value) or 'nothing'}"
    return type(value).__name__
