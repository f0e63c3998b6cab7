"""Clocks of the monitors: for the training, on any device, and for the monitors' own hooks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = float | torch.cuda.Event
"""A moment of the training: seconds on the host, or an event in the stream of the GPU."""


class Clock:
    """Marks moments of the training and returns the seconds between them.

    A GPU works behind the host. On a GPU, a moment is an event in the GPU's stream, recorded
    without waiting. :meth:`wait` waits until the device has reached a moment.

    Args:
        device: Where the training runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        """Mark the moment at which the device has finished all work submitted so far."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, mark: Mark) -> None:
        """Wait until the device has come to a moment."""
        if not isinstance(mark, float):
            mark.synchronize()

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Return the seconds between two moments already reached by the device."""
        if isinstance(begin, float) or isinstance(end, float):
            return float(end) - float(begin)  # type: ignore[arg-type]
        return float(begin.elapsed_time(end)) / 1e3


class OwnTime:
    """Time of a callback in its hooks, beside the time of the training, on the host.

    Waiting for a GPU counts as training.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """In the hooks."""
        self._training_s = 0.0
        self._before: float | None = None

    def start(self) -> None:
        """Begin to count, from this moment on."""
        self.seconds = self._training_s = 0.0
        self._before = time.perf_counter()

    def pause(self) -> None:
        """Leave out the time until :meth:`resume`."""
        self._add_training()
        self._before = None

    def resume(self) -> None:
        """Count from this moment on."""
        if self._before is None:
            self._before = time.perf_counter()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Enter around the work of a hook."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begin

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for the device, inside of :meth:`counted`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds -= time.perf_counter() - begin

    @property
    def share(self) -> float:
        """Share of the training time spent in the hooks. 0 before any training."""
        self._add_training()
        return self.seconds / self._training_s if self._training_s > 0 else 0.0

    def _add_training(self) -> None:
        if self._before is not None:
            time_now = time.perf_counter()
            self._training_s += time_now - self._before
            self._before = time_now
