"""Ctrl-C and SIGTERM during work with unfinished files and worker processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def _signals_handled(
    numbers: Sequence[int], handler: Callable[[int, object], None]
) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handled in previous.items():
            signal.signal(number, handled)


@contextmanager
def termination_as_exit() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, so that unfinished files are removed. By default SIGTERM ends
    the process at once.
    """

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    with _signals_handled([signal.SIGTERM], leave):
        yield


@contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM to the end of the block: during a fork Python drops signals, or
    loses the worker.
    """
    interrupts: list[int] = []
    with _signals_handled(
        [signal.SIGINT, signal.SIGTERM], lambda number, _: interrupts.append(number)
    ):
        yield
    if interrupts:
        signal.raise_signal(interrupts[0])
