"""Receive signals while the main thread is blocked in a collective.

Python runs a signal's handler in the main thread, between two Python instructions, so never inside
a collective. The C part of the interpreter writes the signal's number into a file descriptor at
once (``signal.set_wakeup_fd``). Another thread reads the file descriptor.
"""

from __future__ import annotations

import os
import signal
import threading


class SignalPipe:
    """Pipe of the numbers of received signals with a handler."""

    def __init__(self) -> None:
        self._reads = self._writes = -1

    def open(self) -> None:
        """Begin to receive. No-op outside the main thread, and if another library listens."""
        if threading.current_thread() is not threading.main_thread() or self._writes >= 0:
            return
        self._reads, self._writes = os.pipe()
        for end in (self._reads, self._writes):
            os.set_blocking(end, False)
        previous = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        if previous >= 0:  # asyncio's, needed for callbacks
            signal.set_wakeup_fd(previous)
            self._close_ends()

    def received(self) -> frozenset[int]:
        """Return the signals since the last call."""
        try:
            return frozenset(os.read(self._reads, 4096)) if self._reads >= 0 else frozenset()
        except (BlockingIOError, OSError):
            return frozenset()

    def close(self) -> None:
        """Stop receiving, if this is the main thread: no other may change the descriptor."""
        if threading.current_thread() is not threading.main_thread() or self._writes < 0:
            return
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, self._writes):
            signal.set_wakeup_fd(current)
        self._close_ends()

    def _close_ends(self) -> None:
        os.close(self._reads)
        os.close(self._writes)
        self._reads = self._writes = -1
