"""Asynchronous saves: training waits for a copy of the tensors to host memory, and continues while
a thread writes the copy.

The memory of the copy is reused by the next save: a rank needs as many bytes as the rank writes,
pinned for tensors on CUDA. The thread communicates over a separate process group. Every rank runs a
single job at a time, in the same order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from megatron_lightning.checkpoint.writing.saving import Snapshot
from megatron_lightning.parallel.shards.spec import Shard

SAVING_THREAD = "checkpoint-save"
"""Name of the thread."""
_ALIGN_BYTES = 64


class HostBuffer:
    """Host memory for the copy of a snapshot."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy_of(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with values copied to this buffer, overwriting the previous copy. The
        original values may change afterwards.
        """
        starts, size = [], 0
        for _, shard in snapshot.shards:
            starts.append(size)
            size += -(-shard.data.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        devices = {shard.data.device for _, shard in snapshot.shards if shard.data.is_cuda}
        if size > self._memory.nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free before allocating
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=bool(devices))
        copies = []
        for (name, (offset, data)), start in zip(snapshot.shards, starts, strict=True):
            copy = self._memory[start : start + data.nbytes].view(data.dtype).view(data.shape)
            copy.copy_(data, non_blocking=True)
            copies.append((name, Shard(offset, copy)))
        for device in devices:
            torch.cuda.synchronize(device)
        return replace(snapshot, shards=tuple(copies))


class BackgroundJob:
    """Runs a function in a thread. The process ends only after the thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=SAVING_THREAD)
        self.began_s = time.monotonic()
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
        """Wait for the function. Return the exception, if any."""
        self._thread.join()
        return self._error
