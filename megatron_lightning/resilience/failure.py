"""Describe the failure of a rank, print the failure once, and end a process."""

from __future__ import annotations

import atexit
import os
import re
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

from megatron_lightning.errors import EXPLAINED
from megatron_lightning.resilience.exit_codes import TERMINATED

_END_S = 2.0  # for logs and exit handlers, when the main thread hangs
_NUMBERS = re.compile(r"\d+")
_UNCAUGHT = "_megatron_uncaught"  # on an exception: the text to print in place of the traceback


class PeerFailure(SystemExit):
    """Exit with code 1 and without a message: another rank failed and has printed why."""

    is_final = False
    """Whether the other rank's process is gone. Then no run can follow in these processes."""


@dataclass(frozen=True)
class Failure:
    """Report of a rank's failure."""

    rank: int
    """Global rank. -1: the failure of several ranks, or the loss of the store."""
    host: str
    summary: str
    """One line: the exception, or the way the process ended."""
    details: str = ""
    """Traceback. Empty for a killed process, an interruption, and an exception with a sufficient
    message."""
    position: str = ""
    """Position in the pipeline schedule. Empty outside a schedule."""
    interrupted_by: str = ""
    """Names the signal that stopped the rank. Empty for a failure."""
    explained: bool = False
    """Whether the message suffices without a traceback."""
    printed: bool = False
    """Whether the failing rank itself prints the failure, for all ranks of the rank's node."""
    gone: bool = False
    """Whether the rank's process no longer exists, or the store is lost."""

    @property
    def is_lost_store(self) -> bool:
        """Whether this rank has lost the store, without a report of another rank."""
        return self.rank < 0 and not self.explained

    @property
    def headline(self) -> str:
        """One line with the rank and the reason."""
        if self.rank < 0:
            return self.summary
        where = f" at {self.position}" if self.position else ""
        if self.interrupted_by:
            return f"rank {self.rank} on {self.host} was interrupted{where} ({self.interrupted_by})"
        return f"rank {self.rank} on {self.host} failed{where}: {self.summary}"

    @property
    def text(self) -> str:
        """The headline. With a traceback, the headline comes before and after the traceback."""
        return (
            f"{self.headline}\n{self.details}{_named(self.headline)}"
            if self.details
            else self.headline
        )

    def repeats(self, first: Failure) -> bool:
        """Return whether this is the error of ``first`` again: numbers, of a rank or a file, may
        differ.
        """
        return _NUMBERS.sub("", self.summary) == _NUMBERS.sub("", first.summary)

    @classmethod
    def of(cls, rank: int, exception: BaseException, *, explained: bool = False) -> Failure:
        """Describe ``exception``, raised on ``rank``. ``explained``: the message suffices without a
        traceback.
        """
        summary = "".join(traceback.format_exception_only(exception)).strip()
        interrupted_by = _signal_of(exception)
        explained = explained or isinstance(exception, EXPLAINED)
        # The traceback has the other lines.
        line = " ".join(summary.split()) if explained else summary.splitlines()[0]
        hides_details = bool(interrupted_by) or explained
        details = "" if hides_details else "".join(traceback.format_exception(exception))
        position = str(getattr(exception, "pipeline_position", None) or "")
        host = socket.gethostname()
        return cls(rank, host, line, details, position, interrupted_by, explained, printed=True)


def _signal_of(exception: BaseException) -> str:
    """Name the signal behind an exception. Empty for any other exception."""
    if isinstance(exception, KeyboardInterrupt):
        return "Ctrl-C or SIGINT"
    terminated = isinstance(exception, SystemExit) and exception.code == TERMINATED
    return "SIGTERM" if terminated else ""


def end_process(write_logs: Callable[[], object]) -> NoReturn:
    """End this process with exit code 1, even if its main thread is blocked.

    ``write_logs`` and the exit handlers run in another thread, for two seconds at most, because
    both may block, too.
    """

    def finish() -> None:
        for step in (write_logs, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
            with suppress(Exception):  # all other steps run in any case
                step()

    thread = threading.Thread(target=finish, name="process-end", daemon=True)
    thread.start()
    thread.join(_END_S)
    os._exit(1)


def print_message(text: str) -> None:
    """Print to standard error in a single write, since all ranks may print at once."""
    print(f"{_named(text)}\n", end="", file=sys.stderr, flush=True)


def _named(text: str) -> str:
    return f"megatron_lightning: {text}"


def replace_traceback(exception: BaseException, text: str = "") -> None:
    """Print ``text`` instead of a traceback if ``exception`` ends this process. "": print
    nothing.
    """
    vars(exception)[_UNCAUGHT] = text
    previous = sys.excepthook
    if getattr(previous, _UNCAUGHT, False):
        return

    def print_uncaught(
        kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        own: str | None = vars(value).get(_UNCAUGHT)
        if own is None:
            previous(kind, value, trace)
        elif own:
            print_message(own)

    setattr(print_uncaught, _UNCAUGHT, True)
    sys.excepthook = print_uncaught


def is_printed(exception: BaseException) -> bool:
    """Return whether a rank has already printed everything about ``exception``."""
    return vars(exception).get(_UNCAUGHT) == ""
