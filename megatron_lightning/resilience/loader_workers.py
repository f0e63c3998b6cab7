"""DataLoader workers that outlive signals to the whole job.

torchrun and Slurm send SIGTERM to every process of a job, and Slurm sends a requeue signal. A
DataLoader worker ends on either signal, and the rank then fails before the rank has finished the
step and saved. So workers ignore both signals, and end with their rank.

A worker notices the end of the rank in a thread. A sample whose C code keeps the GIL delays the
worker's end, and the end of the rank, until the C code returns.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any

WorkerInit = Callable[[int], None]


class EndWithRank:
    """A ``worker_init_fn`` of workers that ignore signals to the job and end with the process of
    their rank.

    Args:
        init: The loader's function. None: there is none.
        requeue_signal: Slurm's signal for this job, beside SIGTERM and SIGUSR1. None: no further
            signal.
    """

    def __init__(self, init: WorkerInit | None, requeue_signal: int | None = None) -> None:
        self.init = init
        """The loader's function."""
        self._requeue_signal = requeue_signal
        self._end, writer = multiprocessing.Pipe(duplex=False)
        # Runs at the end of the interpreter as well, before multiprocessing waits for workers. Only
        # in the process that made the pipe.
        Finalize(self, _end_workers, args=(writer,), exitpriority=0)

    def __deepcopy__(self, memo: dict[int, Any]) -> EndWithRank:
        """Return a function for other workers."""
        return EndWithRank(self.init, self._requeue_signal)

    def __call__(self, worker: int) -> None:
        """Initialize a worker."""
        # A mask would not do: threads of libraries are older, and programs started by a dataset
        # would inherit the mask. A handler is reset for them.
        signal.set_wakeup_fd(-1)  # a forked worker has the rank's
        signals: set[int] = {signal.SIGTERM, signal.SIGUSR1}  # SIGUSR1: Lightning's default
        for signum in signals | {self._requeue_signal or signal.SIGUSR1}:
            signal.signal(signum, _ignore)
            signal.siginterrupt(signum, False)
        rank = multiprocessing.parent_process()
        ends = [self._end] if rank is None else [self._end, rank.sentinel]
        threading.Thread(target=_end_with, args=(ends,), daemon=True).start()
        if self.init is not None:
            self.init(worker)


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Handle a signal to the whole job."""


def _end_with(ends: list[Any]) -> None:
    """End this process as soon as an entry of ``ends`` is readable."""
    wait(ends)
    os._exit(0)  # as torch's handler of SIGTERM does


def _end_workers(writer: Connection) -> None:
    """Signal workers to end. The bytes are never read, so that every worker sees them."""
    writer.send_bytes(b"end")
    writer.close()
