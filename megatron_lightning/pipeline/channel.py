"""Point-to-point messages between the stages of a pipeline.

A *message* travels from a stage to the next (outputs) or to the previous stage (gradients of
outputs). A message holds several tensors, and the receiver must know the tensors' shapes to post
buffers.

NCCL ignores tags, matches messages by order alone and runs all traffic of a pair of ranks on a
single stream of a communicator, so that a receive posted early would block a later send. Every
(direction in the model, direction along the pp ranks) therefore has a process group of its own.
gloo matches by tag and order.

If the receiver cannot know the shapes of a forward message, a header precedes the message: the
header's length, and the metadata of the tensors with a note of the program as JSON.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.pipeline.message_plan import Message
from megatron_lightning.pipeline.schedules.actions import Placement

# Messages received ahead on a channel: the first in transfer, the second ready for the next action.
_NUM_AHEAD = 2


class StageTensors(tuple[Tensor, ...]):
    """Tensors from a stage to the next, with a note of the program about the tensors."""

    note: str

    def __new__(cls, tensors: Iterable[Tensor] = (), note: str = "") -> StageTensors:
        """Make a value from ``tensors``."""
        tensors_with_note = super().__new__(cls, tensors)
        tensors_with_note.note = note
        return tensors_with_note


class TensorMeta(NamedTuple):
    """Metadata for posting a receive buffer."""

    dtype: torch.dtype
    requires_grad: bool
    shape: tuple[int, ...]

    def __str__(self) -> str:
        gradient = " with gradient" if self.requires_grad else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{gradient}"


class Boundary(NamedTuple):
    """Metadata of a message."""

    tensors: tuple[TensorMeta, ...]
    note: str = ""
    """The note of the sending program."""

    def __str__(self) -> str:
        return ", ".join(map(str, self.tensors)) or "nothing"


def describe(tensors: tuple[Tensor, ...], *, backward: bool) -> Boundary:
    """Return the metadata of a stage's outputs. No tensor takes a gradient in a step without
    backward.
    """
    metas = [TensorMeta(t.dtype, backward and t.requires_grad, tuple(t.shape)) for t in tensors]
    return Boundary(tuple(metas), getattr(tensors, "note", ""))


def encode_header(boundary: Boundary, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the length of a header, an int64, and the header's bytes."""
    tensors = [
        [str(dtype).removeprefix("torch."), requires_grad, shape]
        for dtype, requires_grad, shape in boundary.tensors
    ]
    data = bytearray(json.dumps([tensors, boundary.note]).encode())
    content = torch.frombuffer(data, dtype=torch.uint8).to(device)
    return torch.tensor([len(data)], device=device), content


def decode_header(content: Tensor) -> Boundary:
    """Return the metadata in the bytes written by :func:`encode_header`."""
    tensors, note = json.loads(bytes(content.tolist()))
    metas = [
        TensorMeta(getattr(torch, dtype), requires_grad, tuple(shape))
        for dtype, requires_grad, shape in tensors
    ]
    return Boundary(tuple(metas), note)


class Transport:
    """The process groups of a pipeline, with sends and receives by pp rank.

    Creating a transport is collective over the pipeline group. A pipeline of a single rank creates
    nothing.

    Args:
        context: Groups of this rank.
        placement: Map from stages to pipeline ranks.

    Raises:
        ConfigError: If the placement is for another number of pipeline ranks.
    """

    def __init__(self, context: ParallelContext, placement: Placement) -> None:
        if placement.num_ranks != context.pp.size:
            raise ConfigError(
                f"the pipeline placement is for {placement.num_ranks} ranks, and "
                f"pipeline_model_parallel_size is {context.pp.size}. Make them equal."
            )
        self.device = context.device
        self.pp_rank = context.pp.rank
        hops = list(zip(placement.pp_ranks, placement.pp_ranks[1:], strict=False))
        edges = {(True, a, b) for a, b in hops if a != b} | {
            (False, b, a) for a, b in hops if a != b
        }
        self._edges = sorted(edges)
        self.groups: dict[tuple[bool, bool], dist.ProcessGroup] = {}
        """Communicators by direction in the model (forward) and along the pp ranks (up)."""
        for forward, source, destination in self._edges:
            key = (forward, source < destination)
            if key not in self.groups:
                towards = "up" if source < destination else "down"
                name = f"pp-{'forward' if forward else 'backward'}-{towards}"
                group = context.new_process_group(context.pp.ranks, name)
                if group is not None:  # None for a group of a single rank, without edges
                    self.groups[key] = group

    def group(self, forward: bool, source: int, destination: int) -> dist.ProcessGroup:
        """Return the group of the channel from one pp rank to another."""
        return self.groups[forward, source < destination]

    def warm_up(self) -> None:
        """Exchange a number on every channel, so that communicators exist before the first step.

        All ranks walk the channels in the same order: creating a communicator blocks both ends, and
        any other order could close a circle of waiting ranks.
        """
        for forward, source, destination in self._edges:
            number = torch.zeros(1, device=self.device)
            if self.pp_rank == source:
                self.group(forward, source, destination).send([number], destination, 0).wait()
            elif self.pp_rank == destination:
                self.group(forward, source, destination).recv([number], source, 0).wait()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class BoundaryBook(Protocol):
    """Record of the metadata of messages."""

    def expected(self, message: Message) -> Boundary | None:
        """Return the metadata of a message. None: not known before the message's header, or not
        yet.
        """
        ...

    def record(self, message: Message, boundary: Boundary) -> None:
        """Record the metadata of a header."""
        ...


class Inbox:
    """Messages that arrive on a directed channel during a step, received in the order of
    ``expected``.

    Receives of ``_NUM_AHEAD`` messages are posted ahead, so that data arrives while the stage
    computes.

    Args:
        transport: The process groups.
        forward: Direction in the model.
        peer: Sending pipeline rank.
        expected: Messages, in the order of arrival.
        book: Record of their metadata.
    """

    def __init__(
        self,
        transport: Transport,
        forward: bool,
        peer: int,
        expected: Iterable[Message],
        book: BoundaryBook,
    ) -> None:
        self._group = transport.group(forward, peer, transport.pp_rank)
        self._peer = peer
        self._device = transport.device
        self._book = book
        self._expected = deque(expected)
        self._posted: deque[tuple[tuple[Tensor, ...], list[dist.Work]]] = deque()

    def refill(self) -> None:
        """Post receives for messages with known shapes."""
        while self._expected and len(self._posted) < _NUM_AHEAD:
            boundary = self._book.expected(self._expected[0])
            if boundary is None:
                break
            self._post(boundary)

    def take(self) -> tuple[Tensor, ...]:
        """Wait for the next message. Return the message's tensors."""
        if not self._posted:
            message = self._expected[0]
            boundary = self._book.expected(message)
            if boundary is None:
                boundary = self._receive_header(message)
                self._book.record(message, boundary)
            self._post(boundary)
        buffers, works = self._posted.popleft()
        for work in works:
            work.wait()
        return buffers

    def _receive_header(self, message: Message) -> Boundary:
        length = torch.empty(1, dtype=torch.int64, device=self._device)
        self._group.recv([length], self._peer, message.tag).wait()
        content = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        self._group.recv([content], self._peer, message.tag).wait()
        return decode_header(content)

    def _post(self, boundary: Boundary) -> None:
        tag, buffers, works = self._expected.popleft().tag, [], []
        for dtype, _, shape in boundary.tensors:
            buffer = torch.empty(shape, dtype=dtype, device=self._device)
            buffers.append(buffer)
            works.append(self._group.recv([_real(buffer)], self._peer, tag))
        self._posted.append((tuple(buffers), works))


class _Sent(NamedTuple):
    """An in-flight message."""

    position: int
    """Position of the receiving action, in the receiver's list."""
    tensors: list[Tensor]
    works: list[dist.Work]


class Outbox:
    """Messages sent to a pp rank during a step, kept alive until delivery.

    gloo's sends complete only when waited for. A message therefore also counts as delivered when
    the receiver has sent the result of a later action: both positions are in the schedule. If
    nothing comes back, as in validation, the outbox waits for the oldest messages when more than
    :attr:`Message.ahead` are in flight.

    Args:
        transport: The process groups.
        peer: Receiving pipeline rank.
    """

    def __init__(self, transport: Transport, peer: int) -> None:
        self._transport = transport
        self._peer = peer
        self._sent: dict[bool, deque[_Sent]] = {True: deque(), False: deque()}

    def send(self, message: Message, tensors: Iterable[Tensor]) -> None:
        """Send the tensors of a message. Wait for the oldest messages if more than
        :attr:`Message.ahead` are in flight.
        """
        queue, send = self._sent[message.forward], _Sent(message.peer_position, [], [])
        _drop_delivered(queue, 0, message.ahead)
        group = self._transport.group(message.forward, self._transport.pp_rank, self._peer)
        for tensor in tensors:
            contiguous = tensor.detach().contiguous()
            send.tensors.append(contiguous)
            send.works.append(group.send([_real(contiguous)], self._peer, message.tag))
        if send.works:
            queue.append(send)

    def release(self, position: int) -> None:
        """Release messages delivered to a receiver that has reached ``position`` of the receiver's
        actions.
        """
        for queue in self._sent.values():
            if queue:
                _drop_delivered(queue, position, len(queue))

    def finish(self) -> None:
        """Wait until everything is delivered."""
        for queue in self._sent.values():
            _drop_delivered(queue, 0, 0)


def _drop_delivered(queue: deque[_Sent], position: int, ahead: int) -> None:
    """Drop messages delivered to a receiver that has reached ``position``. Wait for the oldest
    beyond ``ahead`` messages.
    """
    while queue and (
        len(queue) > ahead or queue[0].position < position or queue[0].works[-1].is_completed()
    ):
        for work in queue.popleft().works:
            work.wait()
