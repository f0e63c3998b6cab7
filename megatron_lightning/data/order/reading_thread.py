"""DataLoader that reads the next batches in a thread, while the host waits for a device.

A worker process sends every batch through shared memory and a queue. For samples that are slices
of mapped files, sending takes longer than reading.

A pass over the data begins in the calling thread: the samplers of a parallel run broadcast their
order on the first read, and collectives of two threads would mix. The random generators of torch
and numpy belong to the process, not to a thread. The datasets must therefore draw from generators
of their own, seeded by the sample, as the datasets of this package do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.data import DataLoader

_AHEAD = 2  # batches: one to hand out at once, one that is being read
_END = object()


class ReadingThreadLoader(DataLoader[Any]):
    """DataLoader without workers that reads two batches ahead in a thread.

    The thread ends with the pass, and when the iterator is dropped or a read fails. An error in the
    thread is raised with its traceback in place of the batch. The end of the process waits for the
    batch at hand.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # Here and not in the generator, since torch draws a seed from the process's generator.
        return _read_ahead(super().__iter__())


def _read_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    batch = next(batches, _END)
    device = device_of_thread()
    pool = ThreadPoolExecutor(1, "reading", initializer=use_device, initargs=(device,))
    try:
        reads = deque(pool.submit(next, batches, _END) for _ in range(_AHEAD))
        while batch is not _END:
            yield batch
            batch = reads.popleft().result()
            reads.append(pool.submit(next, batches, _END))
    finally:
        # Without waiting, so that a stuck store delays no error. The end of the process joins the
        # thread.
        pool.shutdown(wait=False, cancel_futures=True)


def device_of_thread() -> int | None:
    """Return the number of the GPU that this thread uses. None: the process uses none yet."""
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.current_device() if is_used else None


def use_device(device: int | None) -> None:
    """Choose the GPU of this thread, also for pinned memory: a new thread begins with GPU 0."""
    if device is not None:
        torch.cuda.set_device(device)
