"""Asynchronous saves: training waits while its tensors are copied to host memory, and goes on while a thread writes them.

The copy is kept and used again by the next save, so a rank needs once the bytes that it writes, pinned where the tensors are on
CUDA. The thread communicates over a process group of its own; every rank has one job at a time, in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_lightning.checkpoint.saving import Snapshot

_ALIGN_BYTES = 64


class HostBuffer:
    """Host memory that holds the copy of one snapshot."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Size of the memory."""
        return self._memory.nbytes

    def copy_of(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with its values copied here; the copy made before is overwritten.

        The values may change as soon as this returns.
        """
        starts, size = [], 0
        for piece in snapshot.pieces:
            starts.append(size)
            size += -(-piece.view.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        devices = {piece.view.device for piece in snapshot.pieces if piece.view.is_cuda}
        if size > self.num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # first give back, then take
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=bool(devices))
        pieces = []
        for piece, start in zip(snapshot.pieces, starts, strict=True):
            copy = self._at(start, piece.view)
            copy.copy_(piece.view, non_blocking=True)
            pieces.append(piece._replace(view=copy))
        for device in devices:
            torch.cuda.synchronize(device)
        return replace(snapshot, pieces=tuple(pieces))

    def _at(self, start: int, like: Tensor) -> Tensor:
        return self._memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


class BackgroundJob:
    """Runs one function in a thread that outlives the main thread's code: the process ends after it.

    Args:
        work: The function.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint-save")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._error = error

    @property
    def running(self) -> bool:
        """Whether the function has not returned yet."""
        return self._thread.is_alive()

    def wait(self) -> Exception | None:
        """Wait for the function; return what it raised, if it did."""
        self._thread.join()
        return self._error
