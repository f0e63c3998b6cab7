"""Requests to stop a run, on one rank: signals, a file, and a time on rank 0's clock.

Handlers only record signals: inside a collective, saving or communicating in a handler would wait
forever. Whoever runs the batches asks for the request, and agrees with the other ranks.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

_FILE_POLL_S = 1.0  # between two looks for the stop file, often on a shared file system


class Reason(IntEnum):
    """Why a run is to stop. Of several reasons the largest holds: a person's file outranks signals,
    which may start the job again.
    """

    NONE = 0
    EXIT_AFTER = 1
    SIGTERM = 2
    REQUEUE = 3
    STOP_FILE = 4


class StopRequests:
    """Requests seen by this rank.

    Args:
        handles_sigterm: Whether SIGTERM is a request.
        stop_file: File whose existence is a request. None: no file.
        exit_after: Time from the start of the run to a stop. None: no limit.
    """

    def __init__(
        self, *, handles_sigterm: bool, stop_file: str | Path | None, exit_after: timedelta | None
    ) -> None:
        self._handles_sigterm = handles_sigterm
        self._stop_file = None if stop_file is None else Path(stop_file)
        self._exit_after_s = math.inf if exit_after is None else exit_after.total_seconds()
        self._received = Reason.NONE
        self._previous: dict[int, Any] = {}
        self._started_s = time.monotonic()
        self._looked_s = -math.inf

    def begin(self) -> None:
        """Begin to count time."""
        self._started_s = time.monotonic()

    # -------------------------------------------------------------------------------------- signals

    def record_signal(self, signum: int, frame: FrameType | None = None) -> None:
        """Record a signal. For use as a signal handler."""
        reason = Reason.SIGTERM if signum == signal.SIGTERM else Reason.REQUEUE
        self._received = max(self._received, reason)

    def install_handlers(self, requeue: int | None) -> None:
        """Record signals from now on. No-op outside the main thread, and if installed.

        Args:
            requeue: Slurm's signal to save and requeue. None: no signal.
        """
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        sigterm = [signal.SIGTERM] if self._handles_sigterm else []
        for signum in [*sigterm, *([] if requeue is None else [requeue])]:
            self._previous[signum] = signal.signal(signum, self.record_signal)

    def restore_handlers(self) -> None:
        """Restore the replaced handlers."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous = {}

    # ------------------------------------------------------------------------------------- requests

    def current(self, *, is_first: bool) -> Reason:
        """Return the request on this rank.

        Args:
            is_first: Whether this is rank 0, which looks at the clock and, every second, for the
                file.
        """
        reason = self._received
        if not is_first:
            return reason
        time_s = time.monotonic()
        if time_s - self._started_s >= self._exit_after_s:
            reason = max(reason, Reason.EXIT_AFTER)
        if self._stop_file is not None and time_s - self._looked_s >= _FILE_POLL_S:
            self._looked_s = time_s
            if self._stop_file.exists():
                reason = max(reason, Reason.STOP_FILE)
        return reason

    def look_again(self) -> None:
        """Look for the file at the next question, so that a file as young as a signal counts."""
        self._looked_s = -math.inf

    def forget(self) -> None:
        """Forget the signals received."""
        self._received = Reason.NONE

    def remove_file(self) -> None:
        """Remove the stop file. Rank 0 calls this."""
        if self._stop_file is not None:
            self._stop_file.unlink(missing_ok=True)

    def describe(self, reason: Reason, requeue: int | None) -> str:
        """Return the words for a request. ``requeue``: Slurm's signal."""
        return {
            Reason.NONE: "no request",
            Reason.EXIT_AFTER: "exit_after",
            Reason.STOP_FILE: f"the file {self._stop_file}",
            Reason.SIGTERM: "SIGTERM",
            Reason.REQUEUE: f"{signal.Signals(requeue or signal.SIGUSR1).name}, Slurm's signal to "
            "save and requeue",
        }[reason]
