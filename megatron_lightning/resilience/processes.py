"""Watches to end processes together: a starter watches the started processes, and each process
watches the starter.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_lightning.resilience.exit_codes import INTERRUPTED
from megatron_lightning.resilience.failure import end_process, print_message

# Time for processes to raise errors or to be ended by watches, and to write logs.
GRACE_S = 3.0
# A rank ending because of another rank outlives the other rank by this time: a starter takes the
# first ended rank for the cause.
LINGER_S = 0.5
_POLL_S = 0.2


@dataclass(frozen=True)
class Child:
    """A started process."""

    rank: int
    pid: int
    exit_code: Callable[[], int | None]
    """Returns the process's exit code, or minus the number of the killing signal. None while the
    process runs."""

    def describe_end(self, code: int) -> str:
        """Return how the process ended."""
        if code == INTERRUPTED:
            return f"its process {self.pid} was interrupted (Ctrl-C or SIGINT)"
        if code >= 0:
            return f"its process {self.pid} ended with exit code {code}"
        return f"its process {self.pid} was killed by {signal.Signals(-code).name}"


def wait_for(children: Sequence[Child], seconds: float) -> None:
    """Wait until all ``children`` have ended, at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while any(child.exit_code() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)


def kill(children: Sequence[Child]) -> None:
    """Kill ``children``: inside a collective a process answers no other signal."""
    for child in children:
        if child.exit_code() is None:
            os.kill(child.pid, signal.SIGKILL)
    wait_for(children, GRACE_S)


def print_failure(rank: int, how: str) -> None:
    """Print the failed rank."""
    print_message(f"rank {rank} failed: {how}; ending the job")


class ChildWatch(threading.Thread):
    """Thread to end all children after the failure of a child.

    Args:
        children: Returns the processes to watch. Empty before the start of the processes.
        on_failure: Called once with the failed rank and a description of the end, before all other
            processes are ended.
        end: Called last, to end this process as well unless the watch was stopped. None: this
            process is no rank.
    """

    def __init__(
        self,
        children: Callable[[], Sequence[Child]],
        on_failure: Callable[[int, str], None],
        *,
        end: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(name="child-watch", daemon=True)
        self._children = children
        self._on_failure = on_failure
        self._end = end
        self._stopped = threading.Event()
        self._announced = threading.Lock()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def run(self) -> None:
        """Poll until all children have ended with code 0, or a child has failed."""
        while not self._stopped.wait(_POLL_S):
            children = self._children()
            if self.announce():
                deadline = time.monotonic() + GRACE_S
                wait_for(children, GRACE_S)
                kill(children)
                # The main thread may be about to raise the same error, or may wait in a collective
                # for the dead rank.
                if self._end is not None and not self._stopped.wait(
                    max(0.0, deadline - time.monotonic())
                ):
                    self._end()
                return
            if children and all(child.exit_code() == 0 for child in children):
                return

    def announce(self) -> bool:
        """Announce the failed child, once. Return whether any child failed.

        Of several failed children, a child killed or interrupted by a signal is the cause: all
        other children lost a connection and raised. Only SIGTERM is a consequence: workers receive
        SIGTERM after the failure of another worker.
        """
        ended = [(child, child.exit_code()) for child in self._children()]
        failed = [(child, code) for child, code in ended if code]
        failed.sort(
            key=lambda end: (end[1] == -signal.SIGTERM, end[1] > 0 and end[1] != INTERRUPTED)
        )
        if failed and self._announced.acquire(blocking=False):
            child, code = failed[0]
            self._on_failure(child.rank, child.describe_end(code))
        return bool(failed)


class ParentWatch(threading.Thread):
    """Thread to end this process after the end of the starter. The thread calls ``on_end`` with a
    message, and ``write_logs``.
    """

    def __init__(
        self, parent_pid: int, on_end: Callable[[str], None], write_logs: Callable[[], object]
    ) -> None:
        super().__init__(name="parent-watch", daemon=True)
        self._parent_pid = parent_pid
        self._on_end = on_end
        self._write_logs = write_logs

    def run(self) -> None:
        """Poll until the parent has changed."""
        while os.getppid() == self._parent_pid:
            time.sleep(_POLL_S)
        self._on_end(
            f"process {self._parent_pid}, which started this one ({os.getpid()}), has ended"
        )
        end_process(self._write_logs)
