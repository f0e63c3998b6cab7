"""Point-to-point messages between the stages of a pipeline.

A *message* is what one stage hands to the next (forward) or back (backward): several tensors, of shapes that the receiver
must know to post its buffers.

NCCL ignores tags, matches messages by order alone and runs all traffic of a pair of ranks on one stream of a communicator,
where a receive posted early would block a later send. Every (direction in the model, direction along the coordinates)
therefore has a process group of its own. gloo matches by tag and order.

A forward message whose shapes the receiver cannot know is preceded by a header of fixed size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.errors import ConfigError, PipelineError
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.pipeline.actions import Placement
from megatron_lightning.pipeline.plan import Message

_HEADER_NUMBERS = 256  # 2 KiB: 40 tensors of three dims
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
)


class TensorMeta(NamedTuple):
    """What a receiver must know of a tensor."""

    dtype: torch.dtype
    requires_grad: bool
    shape: tuple[int, ...]

    def __str__(self) -> str:
        gradient = " with gradient" if self.requires_grad else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{gradient}"


Boundary = tuple[TensorMeta, ...]


def describe(tensors: Iterable[Tensor], *, backward: bool) -> Boundary:
    """Return the metadata of a stage's outputs; no tensor takes a gradient in a step without backward."""
    return tuple(TensorMeta(t.dtype, backward and t.requires_grad, tuple(t.shape)) for t in tensors)


def encode_header(boundary: Boundary, device: torch.device) -> Tensor:
    """Write metadata into an int64 tensor of fixed size.

    Raises:
        PipelineError: If a dtype is not known, or the metadata needs more room.
    """
    numbers = [len(boundary)]
    for dtype, requires_grad, shape in boundary:
        if dtype not in _DTYPES:
            raise PipelineError(f"a tensor between stages has dtype {dtype}, which messages do not carry. Cast it before.")
        numbers += [_DTYPES.index(dtype), requires_grad, len(shape), *shape]
    if len(numbers) > _HEADER_NUMBERS:
        raise PipelineError(
            f"a stage hands on {len(boundary)} tensors, described by {len(numbers)} numbers, and a header holds "
            f"{_HEADER_NUMBERS}. Stack them into fewer tensors."
        )
    return torch.tensor(numbers + [0] * (_HEADER_NUMBERS - len(numbers)), dtype=torch.int64, device=device)


def decode_header(header: Tensor) -> Boundary:
    """Read what :func:`encode_header` wrote."""
    numbers = iter(header.tolist())

    def tensor() -> TensorMeta:
        dtype, requires_grad, num_dims = next(numbers), next(numbers), next(numbers)
        return TensorMeta(_DTYPES[dtype], bool(requires_grad), tuple(next(numbers) for _ in range(num_dims)))

    return tuple(tensor() for _ in range(next(numbers)))


class Transport:
    """The process groups of a pipeline, and sends and receives on them by coordinate.

    Creating it is collective over the pipeline group; a pipeline of one rank creates nothing.

    Args:
        context: Groups of this rank.
        placement: Where the stages live.

    Raises:
        ConfigError: If the placement is for another number of pipeline ranks.
    """

    def __init__(self, context: ParallelContext, placement: Placement) -> None:
        if placement.num_coordinates != context.pp.size:
            raise ConfigError(
                f"the pipeline placement is for {placement.num_coordinates} ranks, and pipeline_model_parallel_size is "
                f"{context.pp.size}. Make them equal."
            )
        self.device, self._pp = context.device, context.pp
        hops = list(zip(placement.coordinates, placement.coordinates[1:], strict=False))
        edges = {(True, a, b) for a, b in hops if a != b} | {(False, b, a) for a, b in hops if a != b}
        self._edges = sorted(edges)
        self._groups: dict[tuple[bool, bool], dist.ProcessGroup | None] = {}
        for forward, source, destination in self._edges:
            key = (forward, source < destination)
            if key not in self._groups:
                name = f"pp-{'forward' if forward else 'backward'}-{'up' if source < destination else 'down'}"
                self._groups[key] = context.new_process_group(context.pp.ranks, name)

    @property
    def num_groups(self) -> int:
        """Process groups created."""
        return len(self._groups)

    def send(self, message: Message, tensor: Tensor) -> dist.Work:
        """Start to send a contiguous tensor, which must stay alive and unchanged until the work is waited for."""
        peer = _remote(message)
        return self._group(message.forward, self._pp.rank < peer).send([_real(tensor)], peer, message.tag)

    def receive(self, message: Message, buffer: Tensor) -> dist.Work:
        """Start to receive into ``buffer``."""
        peer = _remote(message)
        return self._group(message.forward, peer < self._pp.rank).recv([_real(buffer)], peer, message.tag)

    def _group(self, forward: bool, up: bool) -> dist.ProcessGroup:
        group = self._groups[forward, up]
        if group is None:
            raise PipelineError(
                "this rank is not in the pipeline group it sends on. Make the context on the rank that uses it."
            )
        return group

    def warm_up(self) -> None:
        """Exchange one number on every channel, so that communicators exist before the first step.

        All ranks walk the channels in one order: creating a communicator blocks both ends, and any other order could
        close a circle of ranks that wait for one another.
        """
        for forward, source, destination in self._edges:
            number = torch.zeros(1, device=self.device)
            message = Message(forward, 0, 0, destination if self._pp.rank == source else source, 0, 0)
            if self._pp.rank == source:
                self.send(message, number).wait()
            elif self._pp.rank == destination:
                self.receive(message, number).wait()


def _remote(message: Message) -> int:
    if message.peer is None:
        raise PipelineError(f"the message for stage {message.stage}, micro-batch {message.microbatch} stays on this rank.")
    return message.peer


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class BoundaryBook(Protocol):
    """What an inbox asks about the messages it expects."""

    def expected(self, message: Message) -> Boundary | None:
        """Return the tensors of a message; None: not known before its header, or not yet."""
        ...

    def learn(self, message: Message, boundary: Boundary) -> None:
        """Take note of what a header said."""
        ...


class Inbox:
    """Messages that arrive on one directed channel during a step, received in the order of ``expected``.

    Receives of up to ``window`` messages are posted ahead, so that data arrives while the stage computes.
    """

    def __init__(self, transport: Transport, expected: Iterable[Message], book: BoundaryBook, *, window: int) -> None:
        self._transport, self._book, self._window = transport, book, window
        self._expected = deque(expected)
        self._posted: deque[tuple[tuple[Tensor, ...], list[dist.Work]]] = deque()

    def refill(self) -> None:
        """Post receives for messages whose shapes are known, up to the window."""
        while self._expected and len(self._posted) < self._window:
            boundary = self._book.expected(self._expected[0])
            if boundary is None:
                break
            self._post(boundary)

    def take(self) -> tuple[Tensor, ...]:
        """Return the next message's tensors, when they are there."""
        if not self._posted:
            message = self._expected[0]
            boundary = self._book.expected(message)
            if boundary is None:
                header = torch.empty(_HEADER_NUMBERS, dtype=torch.int64, device=self._transport.device)
                self._transport.receive(message, header).wait()
                boundary = decode_header(header)
                self._book.learn(message, boundary)
            self._post(boundary)
        buffers, works = self._posted.popleft()
        for work in works:
            work.wait()
        return buffers

    def _post(self, boundary: Boundary) -> None:
        message, device = self._expected.popleft(), self._transport.device
        buffers = tuple(torch.empty(meta.shape, dtype=meta.dtype, device=device) for meta in boundary)
        self._posted.append((buffers, [self._transport.receive(message, buffer) for buffer in buffers]))


class Outbox:
    """Messages sent to one coordinate during a step, kept alive until they are delivered.

    gloo's sends complete only when waited for. A message is therefore also known to be delivered when the receiver has
    sent something that it did after receiving it: both positions are in the schedule.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._sent: dict[bool, deque[tuple[int, Tensor, dist.Work]]] = {True: deque(), False: deque()}

    def send(self, message: Message, tensors: Iterable[Tensor]) -> None:
        """Send tensors that make up one message."""
        queue = self._sent[message.forward]
        for tensor in tensors:
            contiguous = tensor.detach().contiguous()
            queue.append((message.peer_position, contiguous, self._transport.send(message, contiguous)))

    def release(self, position: int = 0) -> None:
        """Let go of what is delivered, given that the receiver has come to ``position`` of its actions."""
        for queue in self._sent.values():
            while queue and (queue[0][0] < position or queue[0][2].is_completed()):
                queue.popleft()[2].wait()

    def finish(self) -> None:
        """Wait until everything is delivered."""
        for queue in self._sent.values():
            while queue:
                queue.popleft()[2].wait()
