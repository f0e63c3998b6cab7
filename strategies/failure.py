"""One rank's failure ends the whole job: its report travels through the store, never through a collective.

A rank that raises writes a report under one key of the job's key-value store; the first report stays, because the later ones
are mostly consequences of it. Every rank looks for that key from a thread. A rank that finds another rank's report, or loses
the store, prints it and ends its own process after a short grace, because it may sit in a collective that can never finish
and that no Python exception can reach. Loggers and exit handlers still have their turn, from another thread.

A rank that loses its connection to another one looks for the reason first. Where nobody reports any, it calls the roll: every
rank answers from its thread, and one that does not has fallen silent (it was killed, or its node is gone) and is named.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import NoReturn

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from megatron_lightning import compat
from megatron_lightning.errors import CheckpointError, ConfigError, DataError
from megatron_lightning.strategies.lightning_internals import TunerExit, refuses_settings

_FAILURE, _ALARM = "failure", "alarm"
_STORE_SECONDS_PER_RANK = 1e-3  # all ranks ask one store: at most about a thousand requests a second
_ROLL_CALL_S = 3.0  # for every rank's thread to answer, also on a busy machine
_LAST_S = 2.0  # for what a process writes at its end, when its main thread hangs
_TERMINATED = 128 + signal.SIGTERM  # exit code, as shells have it
_LOST = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "remote process exited", "imed out")
_GLOO = "gloo/"  # a path in gloo's own source begins each of its messages; its errors have no class of their own


class AgreedStop(SIGTERMException):
    """All ranks end the run here and know it: none has failed, and none waits for another."""


class PeerFailure(SystemExit):
    """Another rank failed, which the screen says; this one ends with exit code 1 and has nothing to add."""


@dataclass(frozen=True)
class Failure:
    """Why a rank stopped."""

    rank: int
    """Global rank that failed; -1: not one rank, the connection to the others."""
    host: str
    """Host name of that rank."""
    summary: str
    """One line: the exception, or how the process ended."""
    details: str = ""
    """Traceback; empty for a process that was killed, for an interruption, and for what the message tells how to mend."""
    position: str = ""
    """Where in the pipeline schedule it happened; empty outside a schedule."""
    interrupted: bool = False
    """Whether somebody stopped it, with Ctrl-C or SIGINT."""

    @property
    def headline(self) -> str:
        """One line that names the rank and the reason."""
        if self.rank < 0:
            return self.summary
        where = f" at {self.position}" if self.position else ""
        if self.interrupted:
            return f"rank {self.rank} on {self.host} was interrupted{where} (Ctrl-C or SIGINT)"
        return f"rank {self.rank} on {self.host} failed{where}: {self.summary}"

    @classmethod
    def of(cls, rank: int, exception: BaseException) -> Failure:
        """Describe ``exception`` as raised on ``rank``."""
        summary = "".join(traceback.format_exception_only(exception)).strip()
        interrupted = isinstance(exception, KeyboardInterrupt)
        mendable = isinstance(exception, (ConfigError, DataError, CheckpointError)) or refuses_settings(exception)
        first_line = " ".join(summary.split()) if mendable else summary.splitlines()[0]  # further ones stand in the traceback
        details = "" if interrupted or mendable else "".join(traceback.format_exception(exception))
        position = str(getattr(exception, "pipeline_position", None) or "")
        return cls(rank, socket.gethostname(), first_line, details, position, interrupted)


def end_process(write_logs: Callable[[], object]) -> NoReturn:
    """End this process with exit code 1, whatever its main thread waits for.

    What is to be done at the end is done in a thread, for two seconds at most: it may wait for the same.

    Args:
        write_logs: Called before the functions registered with ``atexit``, and before standard output is written out.
    """

    def finish() -> None:
        for step in (write_logs, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
            with suppress(Exception):  # each its own turn; how the job failed is on screen
                step()

    last = threading.Thread(target=finish, name="process-end", daemon=True)
    last.start()
    last.join(_LAST_S)
    os._exit(1)


class FailureWatch:
    """Reports this rank's failure to the others and ends this process when another rank failed.

    Every rank makes one after the default process group exists, starts it, and stops it at the end of the run. Watches of one
    process group are numbered, so that a failure which all ranks survived does not end their next run.

    Args:
        store: Key-value store of the job; None: the default process group's, over a connection of its own.
        rank: This process's global rank; None: as in the default process group.
        world_size: Ranks of the job; None: as in the default process group.
        poll_s: Seconds between two looks at the store, for jobs of up to some hundred ranks.
        grace_s: Seconds that the main thread has to meet an error of its own before the process is ended, and as many for
            its way out if the error is no more than the loss of another rank.
        roll_call_s: Seconds that the ranks have to answer when a connection was lost and nobody says why.
        write_logs: Called before this process is ended.
    """

    def __init__(
        self,
        store: compat.Store | None = None,
        rank: int | None = None,
        *,
        world_size: int | None = None,
        poll_s: float = 0.1,
        grace_s: float = 2.0,
        roll_call_s: float = _ROLL_CALL_S,
        write_logs: Callable[[], object] = lambda: None,
    ) -> None:
        store = compat.default_store() if store is None else store
        self._rank = dist.get_rank() if rank is None else rank
        number = store.add(f"megatron_lightning/watches/{self._rank}", 1)
        self._store = compat.PrefixStore(f"megatron_lightning/watch/{number}", store)
        self._store.set(f"host/{self._rank}", socket.gethostname())
        self._world_size = world_size or (dist.get_world_size() if dist.is_initialized() else 1)
        self._poll_s, self._grace_s = max(poll_s, self._world_size * _STORE_SECONDS_PER_RANK), grace_s
        self._roll_call_s, self._answered, self._follows = roll_call_s, False, False
        self._write_logs = write_logs
        self._stopped, self._leaving, self._announced = threading.Event(), threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="failure-watch", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; a no-op when stopped already."""
        self._stopped.set()
        self._leaving.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def report(self, exception: BaseException) -> bool:
        """Tell the other ranks that this one fails, unless they have agreed on it, and print which failure came first.

        This process is then left to its own way out: it has an exception to raise. An attribute ``pipeline_position`` of the
        exception becomes part of the report.

        Returns:
            Whether the exception says no more than that the connection to another rank was lost, which failed before.
        """
        if isinstance(exception, AgreedStop | TunerExit):
            return False
        if isinstance(exception, SIGTERMException):  # code None is success, with which an agent waits for the other nodes
            exception.code = _TERMINATED
        lost = self._follows = _is_lost_connection(exception)
        self._leaving.set()
        if lost and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it leaves; Lightning's handler would talk to ranks that are gone
        first = (self._find_cause() if lost else None) or self._publish(Failure.of(self._rank, exception))
        if first.rank != self._rank:
            self._announce(first, f"rank {self._rank} ends with it")
        elif self._announced.acquire(blocking=False):  # the others may be ended before they can say it
            _print(first.headline)
            time.sleep(2 * self._poll_s)  # they read it before this process ends, and perhaps the store with it
        return lost and first.rank != self._rank

    def abort(self) -> None:
        """Break this rank's connections, so that peers that wait for it fail at once where the backend can do that."""
        compat.abort_process_groups()

    def report_child(self, rank: int, summary: str) -> None:
        """Tell the other ranks that the process of another rank of this node ended, and print which failure came first."""
        self._announce(self._publish(Failure(rank, socket.gethostname(), summary)), "ending the job")

    def _publish(self, failure: Failure) -> Failure:
        """Write ``failure`` unless there is a report; return the report that stands."""
        try:
            first = self._store.compare_set(_FAILURE, "", json.dumps(asdict(failure)))
            self._store.set(_ALARM, "1")
            return Failure(**json.loads(first))
        except RuntimeError as error:
            return self._lost(error)

    def _look(self, *, answering: bool = False) -> Failure | None:
        """Return the failure that stands, if there is one; if ``answering``, do so when the roll is called."""
        try:
            if not self._store.check([_ALARM]):
                return None
            if self._store.check([_FAILURE]):
                return Failure(**json.loads(self._store.get(_FAILURE)))
            if answering and not self._answered:
                self._answered = True
                self._store.set(f"present/{self._rank}", "1")
                self._store.add("present", 1)
            return None
        except RuntimeError as error:
            return self._lost(error)

    def _lost(self, error: RuntimeError) -> Failure:
        host = "torchrun's agent" if "TORCHELASTIC_RUN_ID" in os.environ else "rank 0"
        return Failure(-1, "", f"{host}, which keeps the job's store, has ended ({str(error).splitlines()[0]})")

    def _find_cause(self) -> Failure | None:
        """Return why a connection was lost, for which the main thread waits; None: all ranks are there, and nobody knows."""
        deadline, own = time.monotonic() + self._roll_call_s, str(self._rank).encode()
        try:
            self._store.set(_ALARM, "1")
            first_to_ask = self._store.compare_set("caller", "", str(self._rank)) == own
            while (failure := self._look()) is None:
                time.sleep(self._poll_s)
                if self._store.add("present", 0) == self._world_size:
                    return None
                late_s = time.monotonic() - deadline
                if late_s > 0 and first_to_ask:  # one rank reads the list, however many have lost the connection
                    silent = self._silent()
                    return None if silent is None else self._publish(silent)
                if late_s > self._roll_call_s:
                    return None
            return failure
        except RuntimeError as error:
            return self._lost(error)

    def _silent(self) -> Failure | None:
        """Return the failure of the ranks that have not answered, if there are any."""
        absent = [rank for rank in range(self._world_size) if not self._store.check([f"present/{rank}"])]
        if not absent:
            return None
        known = f"host/{absent[0]}"
        host = self._store.get(known).decode() if self._store.check([known]) else "an unknown host"
        others = f", nor do ranks {', '.join(map(str, absent[1:9]))}" if absent[1:] else ""
        return Failure(absent[0], host, f"it no longer answers{others}: its process was killed, or its node is gone")

    def _watch(self) -> None:
        while not self._stopped.wait(self._poll_s):
            failure = self._look(answering=True)
            if failure is None:
                continue
            if self._stopped.is_set() or (failure.rank == self._rank and self._leaving.is_set()):
                return
            if failure.rank < 0 and self._stopped.wait(self._grace_s):
                return  # the end of an ordinary run: another process was a little faster
            self._announce(failure, f"rank {self._rank} ends, because it would wait for it forever")
            # No exception reaches a main thread that waits in a collective. One that has met an error of its own is left to
            # it (all ranks may be saving what they have); one that lost its peers would wait for them in a callback as well.
            if not self._leaving.wait(self._grace_s) or (self._follows and not self._stopped.wait(self._grace_s)):
                end_process(self._write_logs)
            return

    def _announce(self, failure: Failure, consequence: str) -> None:
        """Print ``failure`` once; its traceback is printed by one rank only."""
        if not self._announced.acquire(blocking=False):
            return
        details = failure.details if self._rank == (1 if failure.rank == 0 else 0) else ""
        _print(f"{failure.headline}; {consequence}\n{details}".rstrip())


def _print(text: str) -> None:
    """Write in one piece, since all ranks may write at once."""
    print(f"megatron_lightning: {text}\n", end="", file=sys.stderr, flush=True)


def _is_lost_connection(exception: BaseException) -> bool:
    """Whether an exception says that another rank is gone; the backends tell it by their texts alone.

    The same words in an error of somebody else's, such as a DataLoader that timed out, say nothing of the kind.
    """
    texts = [str(error) for error in _chain(exception) if _is_of_a_backend(error)]
    return any(words in text for text in texts for words in _LOST)


def _is_of_a_backend(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _GLOO in str(error))


def _chain(exception: BaseException | None) -> Iterator[BaseException]:
    while exception is not None:
        yield exception
        exception = exception.__cause__
