"""Messages that rank 0 prints."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_utilities.core import rank_zero


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def printed_lines() -> Iterator[list[str]]:
    """Yield the list to which the lines of ``rank_zero_info`` are added."""
    handler = _Lines()
    rank_zero.log.addHandler(handler)
    try:
        yield handler.lines
    finally:
        rank_zero.log.removeHandler(handler)
