"""DataLoader workers that outlive a SIGTERM to the whole job.

torchrun and Slurm send SIGTERM to every process of a job. A DataLoader worker ends on SIGTERM, and
the rank then fails before the rank has finished the step and saved. So workers ignore SIGTERM, and
end with their rank.
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
    """A ``worker_init_fn`` of workers that ignore SIGTERM and end with the process of their rank.

    Args:
        init: The loader's function. None: there is none.
    """

    def __init__(self, init: WorkerInit | None) -> None:
        self.init = init
        """The loader's function."""
        self._end, writer = multiprocessing.Pipe(duplex=False)
        # Runs at the end of the interpreter as well, before multiprocessing waits for workers. Only
        # in the process that made the pipe.
        Finalize(self, _end_workers, args=(writer,), exitpriority=0)

    def __deepcopy__(self, memo: dict[int, Any]) -> EndWithRank:
        """Return a function for other workers."""
        return EndWithRank(self.init)

    def __call__(self, worker: int) -> None:
        """Initialize a worker."""
        # A mask would not do: threads of libraries are older, and programs started by a dataset
        # would inherit the mask. A handler is reset for them.
        signal.set_wakeup_fd(-1)  # a forked worker has the rank's
        for signum in (signal.SIGTERM, signal.SIGUSR1):  # SIGUSR1: Slurm's requeue signal
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
    """Tell workers to end. Workers see the bytes without reading them."""
    writer.send_bytes(b"end")
    writer.close()
