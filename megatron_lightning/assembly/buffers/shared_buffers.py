"""Broadcast of buffers held by several ranks, and the choice of buffers to broadcast.

The ranks agree on written buffers by a byte for each buffer, with a max all-reduce. A rank with
news reads the reduced bytes at once, so that the host waits for the device. If all ranks have news,
the ranks send the buffer before the next step. Otherwise the ranks send the buffer a step later,
when the other ranks read a copy on the host without waiting.

Buffers with a changing shape or dtype are caches of a rank's batch, and are left out.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.assembly.buffers.buffer_watch import BufferPlaces, BufferWatch
from megatron_lightning.assembly.checks.replicas import diverged, fingerprint
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.context import AxisGroup

_WRITTEN, _RESHAPED = 1, 2  # 0: neither, or known already


class SharedBuffers:
    """Buffers held by all ranks of a group.

    Args:
        group: The ranks. All ranks receive the first rank's values.
        device: Device of the communication.
        equal: Names of buffers kept equal by other collectives.
        check: Called with the fingerprints of differing buffers, by name. A collective.
    """

    places: BufferPlaces
    """The buffers, equal on all ranks. Set before use."""

    def __init__(
        self,
        group: AxisGroup,
        device: torch.device,
        equal: Collection[str],
        check: Callable[[Mapping[str, Tensor]], None] = lambda _: None,
    ) -> None:
        self.group = group
        self._check = check
        self._unchecked: set[str] = set()  # sent from now on, and not compared yet
        self._device = device
        self._equal = frozenset(equal)
        self._watch: BufferWatch | None = None  # from the first step on
        self._sent: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._left_out: set[str] = set()
        self._num_recent = 0  # batches that begin while an added buffer is new
        self._is_news = False  # this rank has begun to write a buffer
        self._pending: Sequence[int] | _HostCopy | None = None  # agreed, to be sent a step later

    def begin_batch(self) -> bool:
        """Return whether buffers were added in the last two batches: other ranks may have agreed on
        the buffers' values since the last send. The first call only looks at the buffers.
        """
        if self._watch is None and self.group.process_group is not None:
            self._watch = BufferWatch()
            self._watch.written(self.places.current())
        self._num_recent = max(0, self._num_recent - 1)
        return self._num_recent > 0

    def forget_writes(self) -> None:
        """Do not count writes since the last look."""
        if self._watch is not None:
            self._watch.written(self.places.current())

    def synchronize(self, *, compare: bool = False) -> None:
        """Send the buffers chosen so far. A collective.

        Args:
            compare: Whether to look first for buffers with differing values.
        """
        if self.group.process_group is None:
            return
        buffers = self.places.current()
        if compare and buffers:
            self._compare(buffers)
        elif self._unchecked:
            self._compare({name: buffers[name] for name in buffers if name in self._unchecked})
        self._unchecked.clear()
        self._broadcast(buffers)

    def add(self, names: Iterable[str], *, compare: bool = False) -> None:
        """Send the named buffers from now on. All ranks add the same buffers.

        Args:
            names: Their names.
            compare: Whether to compare and check new buffers before sending.
        """
        added, current = {*self._sent, *names} - self._left_out, self.places.current()
        if not added <= self._sent.keys():
            self._num_recent = 3
        if compare:
            self._unchecked |= added - self._sent.keys()
        self._sent = {
            name: self._sent.get(name, (buffer.shape, buffer.dtype))
            for name, buffer in current.items()
            if name in added and buffer is not None
        }

    def begun(self) -> tuple[str, ...]:
        """Return the buffers written by this rank since the last call and not sent yet."""
        if self._watch is None:
            return ()
        return tuple(name for name, mark in self._marks(self._watch).items() if mark == _WRITTEN)

    def _marks(self, watch: BufferWatch) -> dict[str, int]:
        current = self.places.current()
        written_names = watch.written(current)
        known_names = self._sent.keys() | self._left_out | self._equal
        kinds = {False: _WRITTEN, True: _RESHAPED}
        return {
            name: kinds[written_names[name]]
            if name in written_names and name not in known_names
            else 0
            for name in current
        }

    # ------------------------------------------------------------ agreement, once an optimizer step

    def send(self) -> list[int]:
        """Return bytes to reduce by maximum over the ranks, for :meth:`receive`: a byte for each
        buffer, and a byte for whether nothing is new on this rank. Empty without buffers.
        """
        if self._watch is None:
            return []
        marks = list(self._marks(self._watch).values())
        if not marks:
            return []
        self._is_news = any(marks)
        return [*marks, not self._is_news]

    def receive(self, largest: Tensor) -> None:
        """Apply the agreement of the ranks."""
        self.read_pending()
        if not self._is_news:
            self._pending = _HostCopy(largest)
            return
        marks = largest.tolist()  # the host waits for the device
        if marks[-1]:
            self._pending = marks
        else:
            self._adopt(marks)

    def read_pending(self) -> None:
        """Apply an agreement not read yet, before the places change."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._adopt(pending.read() if isinstance(pending, _HostCopy) else pending)

    def _adopt(self, marks: Sequence[int]) -> None:
        if not any(marks[:-1]):
            return
        marked = dict(zip(self.places.current(), marks[:-1], strict=True))
        self._left_out.update(name for name, mark in marked.items() if mark == _RESHAPED)
        self.add(name for name, mark in marked.items() if mark == _WRITTEN)

    # ----------------------------------------------------------------------------------- values

    def _compare(self, buffers: dict[str, Tensor | None]) -> None:
        """Find buffers with differing values, and caches, recognized by differing shapes."""
        names = list(buffers)
        values = torch.stack([self._number(buffer) for buffer in buffers.values()])
        forms = [
            0 if b is None else zlib.crc32(repr((tuple(b.shape), b.dtype)).encode())
            for b in buffers.values()
        ]
        differences = diverged(
            torch.cat([values, torch.tensor(forms, device=self._device)]), self.group
        )
        self._left_out.update(names[i - len(names)] for i in differences if i >= len(names))
        differing = {names[i]: values[i] for i in differences if i < len(names)}
        checked = self._sent.keys() - self._unchecked
        self._check({name: value for name, value in differing.items() if name not in checked})
        self.add(differing)

    def _number(self, buffer: Tensor | None) -> Tensor:
        if buffer is None:
            return torch.zeros((), dtype=torch.int64, device=self._device)
        return fingerprint(buffer).to(self._device)

    def _broadcast(self, buffers: dict[str, Tensor | None]) -> None:
        current = [self._as_agreed(name, buffers[name]) for name in self._sent]
        # Large elements first: the bytes of a buffer begin at a multiple of the element size.
        messages = sorted(current, key=lambda buffer: -buffer.element_size())
        if not messages:
            return
        flat = torch.cat([_as_bytes(buffer).to(self._device) for buffer in messages])
        dist.broadcast(flat, src=self.group.ranks[0], group=self.group.process_group)
        for buffer, values in zip(
            messages, torch.split(flat, [buffer.nbytes for buffer in messages]), strict=True
        ):
            buffer.copy_(values.view(buffer.dtype).view_as(buffer))

    def _as_agreed(self, name: str, buffer: Tensor | None) -> Tensor:
        """Return a buffer to send, in the form expected by the other ranks.

        Raises:
            ConfigError: If the buffer has another form.
        """
        shape, dtype = self._sent[name]
        if buffer is not None and (buffer.shape, buffer.dtype) == (shape, dtype):
            return buffer.detach()
        form = "None" if buffer is None else f"{list(buffer.shape)} in {buffer.dtype}"
        raise ConfigError(
            f"the buffer {name} was {list(shape)} in {dtype} and is {form} now, and the ranks "
            f"{list(self.group.ranks)} give each other its values before every step. Keep its "
            "shape and dtype, or keep what belongs to one batch in a plain attribute."
        )


class _HostCopy:
    """A small tensor on the way to the host, copied without making the host wait."""

    def __init__(self, tensor: Tensor) -> None:
        on_gpu = tensor.device.type == "cuda"
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        self._host.copy_(tensor, non_blocking=True)
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        if self._copied is not None:
            self._copied.record()

    def read(self) -> list[int]:
        """Return the numbers. A step later the copy is already complete."""
        if self._copied is not None:
            self._copied.synchronize()
        return list(map(int, self._host.numpy()))


def _as_bytes(tensor: Tensor) -> Tensor:
    # By strides: a tensor of one entry may have any stride, and counts as contiguous.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
