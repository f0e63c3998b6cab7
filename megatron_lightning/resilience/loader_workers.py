"""DataLoader workers that outlive a SIGTERM to the whole job.

torchrun and Slurm send SIGTERM to every process of a job. A DataLoader worker ends on SIGTERM, and
the rank then fails before the rank has finished the step and saved. So workers only obey a SIGTERM
from the rank. Workers of a rank that is gone end by the DataLoader's own watch.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

WorkerInit = Callable[[int], None]


class OnlyOwnRank:
    """A ``worker_init_fn`` of workers that end on SIGTERM from their own rank alone.

    Args:
        init: The loader's function. None: there is none.
    """

    def __init__(self, init: WorkerInit | None) -> None:
        self.init = init
        """The loader's function."""

    def __call__(self, worker: int) -> None:
        """Initialize a worker."""
        _obey_only(os.getppid())
        if self.init is not None:
            self.init(worker)


def _obey_only(parent: int) -> None:
    """End this process on SIGTERM from ``parent``. Other senders have no effect."""
    # Blocked here and in threads to come. A handler would not know the sender.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_wait_for_parent, args=(parent,), daemon=True).start()
    # Slurm's requeue signal. A forked worker has the rank's handler, which only records.
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _wait_for_parent(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)  # as torch's handler does
