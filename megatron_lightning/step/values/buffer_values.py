"""Buffers held in common by ranks, before and after the steps that write the buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_lightning.assembly.buffers.buffer_broadcast import BufferSync
from megatron_lightning.step.participant import StepBatch, StepParticipant
from megatron_lightning.step.step_run import StepRun


class BufferValues(StepParticipant):
    """Share buffers once a training batch.

    Lightning's own steps share buffers before a batch, since a graph before its backward may hold
    buffers. Pipeline runs have no such graph, and share buffers after a batch.

    Args:
        buffers: Keeps buffers equal on all ranks with the same buffer.
        at_end: Whether known buffers are shared after the batch.
    """

    def __init__(self, buffers: BufferSync, *, at_end: bool) -> None:
        self._buffers = buffers
        self._at_end = at_end

    def begin_batch(self, batch: StepBatch) -> None:
        """Share buffers due before a training batch."""
        if batch.trains:
            self._buffers.begin_batch(batch.number, only_new=self._at_end)

    def share(self, run: StepRun) -> tuple[str, ...]:
        """Return the buffers newly written by the last stage."""
        return self._buffers.begun()

    def apply(self, run: StepRun, shared: Iterable[str]) -> None:
        """Share these buffers from now on."""
        self._buffers.follow(shared)

    def end_batch(self, batch: StepBatch, output: Any) -> None:
        """Share the buffers written by a training batch."""
        if batch.trains and self._at_end:
            self._buffers.synchronize(compare=batch.number == 1)

    @contextmanager
    def rehearsed(self) -> Iterator[None]:
        """Do not count buffer writes of the block, since the writes are undone."""
        yield
        self._buffers.forget_writes()
