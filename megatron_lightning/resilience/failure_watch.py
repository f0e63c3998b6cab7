"""End the job when a rank fails. Reports go through the job's key-value store, never through a
collective.

A rank with an exception writes a report under a common key of the store. The first report stays,
because later reports are mostly consequences of the first. Every rank polls the key from a thread.
On another rank's report, or after losing the store, a rank prints the report and ends the process
after a grace period. Ending the process is necessary because the main thread may be blocked in a
collective: the collective never finishes, and no Python exception can reach the main thread.
Loggers and exit handlers still run, in another thread.

A rank with a lost connection first looks for the cause. If no rank reports a cause, the rank starts
a liveness check: every rank answers from the rank's thread. A rank without an answer (a killed
process, or a lost node) is named. SIGTERM starts a check as well, from the thread: torchrun sends
SIGTERM to the remaining ranks after a rank has died, and the remaining ranks may wait for the dead
rank forever.

The thread also finds ranks that wait for each other although none has failed (``lone_ranks.py``).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

import torch.distributed as dist

from megatron_lightning import compat
from megatron_lightning.resilience.collective_log import Course
from megatron_lightning.resilience.desync import LoneRanks
from megatron_lightning.resilience.failure import (
    Failure,
    end_process,
    print_message,
    replace_traceback,
)
from megatron_lightning.resilience.lost_connection import is_lost_connection
from megatron_lightning.resilience.signals import SignalPipe

_FAILURE = "failure"
_ALARM = "alarm"  # set with a failure and to start a liveness check: the only polled key
# All ranks ask the same store: at most about a thousand requests a second.
_STORE_SECONDS_PER_RANK = 1e-3
_DEAD_GRACE_S = 1.0  # for a main thread waiting for a dead rank, reached by few errors
_WAKE_S = 10.0  # for a woken main thread to raise


class FailureWatch:
    """Thread to end this process after another rank's failure, and to report this rank's failure to
    all other ranks.

    Every rank creates a watch after the default process group exists, starts the watch, and stops
    the watch at the end of the run. Watches of a process group are numbered: a failure survived by
    all ranks does not end the next run.

    Args:
        store: Key-value store of the job. None: the default process group's store, rank and world
            size.
        rank: This process's global rank.
        world_size: Ranks of the job.
        poll_s: Seconds between two polls, for up to some hundred ranks.
        grace_s: Seconds for the main thread to raise an error before the process is ended, and
            again to unwind if the error is only the loss of another rank.
        liveness_s: Seconds for the ranks to answer a liveness check.
        write_logs: Called before this process is ended.
        unblock: Wakes a main thread waiting for other ranks, to start another run in this process.
            None: the process is ended instead. The process is ended in any case if a rank's process
            is gone.
        course: Calls of this rank that all ranks make in the same order. None: not recorded.
    """

    def __init__(
        self,
        store: compat.Store | None = None,
        rank: int | None = None,
        *,
        world_size: int | None = None,
        poll_s: float = 0.1,
        grace_s: float = 2.0,
        liveness_s: float = 3.0,
        write_logs: Callable[[], object] = lambda: None,
        unblock: Callable[[], object] | None = None,
        course: Course | None = None,
    ) -> None:
        store = compat.default_store() if store is None else store
        self._rank = dist.get_rank() if rank is None else rank
        number = store.add(f"megatron_lightning/watches/{self._rank}", 1)
        self._store = compat.PrefixStore(f"megatron_lightning/watch/{number}", store)
        self._store.set(f"host/{self._rank}", socket.gethostname())
        self._world_size = world_size or (dist.get_world_size() if dist.is_initialized() else 1)
        self._course = course
        self._lone_ranks = (
            None if course is None else LoneRanks(course, self._store, self._rank, self._world_size)
        )
        self._poll_s = max(poll_s, self._world_size * _STORE_SECONDS_PER_RANK)
        self._grace_s = grace_s
        self._liveness_s = liveness_s
        self._write_logs = write_logs
        self._unblock = unblock
        self.is_final = False
        """Whether the failure followed by this rank is the end of a process."""
        self._answered = False  # the liveness check
        self._follows = False  # this rank fails because of a lost rank
        self._leaving = threading.Event()  # the main thread has raised, or the run has ended
        self._stopped = threading.Event()
        self._announced = threading.Lock()
        self._signals = SignalPipe()
        self._thread = threading.Thread(target=self._watch, name="failure-watch", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._signals.open()
        self._thread.start()

    def stop(self) -> None:
        """Stop watching. No-op when stopped already."""
        self._stopped.set()
        self._leaving.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._signals.close()
        with suppress(RuntimeError):  # the store has ended
            self._answer()  # for later checks: this rank has left, and is not dead

    def report(
        self,
        exception: BaseException,
        *,
        explained: bool = False,
        prints_traceback: bool = True,
    ) -> bool:
        """Report this rank's failure to the other ranks, and print the first failure. The caller
        ends this process.

        The first failing rank prints a single traceback, or one line if sufficient. The rank prints
        at once, since the process may be ended before Python prints. A rank of the same node prints
        nothing after the same error, or after losing the first rank.

        Args:
            exception: Cause. An attribute ``pipeline_position`` becomes part of the report.
            explained: Whether the message suffices. Then no rank prints a traceback.
            prints_traceback: Whether this process prints the traceback. False: the starter of this
                process prints.

        Returns:
            Whether the exception is only the loss of the connection to an earlier failed rank.
        """
        lost = self._follows = is_lost_connection(exception)
        if self._course is not None:
            self._course.end()
        self._leaving.set()
        if lost and threading.current_thread() is threading.main_thread():
            # A handler could wait for dead ranks.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        failure = Failure.of(self._rank, exception, explained=explained)
        first = (self._find_cause() if lost else None) or self._publish(failure)
        self.is_final = first.gone
        if first.rank != self._rank:
            repeats = not lost and failure.repeats(first)
            if repeats:
                replace_traceback(exception)
            elif failure.explained and not lost:
                replace_traceback(exception, failure.headline)
            if not repeats or first.host != failure.host:
                verb = "ends" if self._unblock is None or first.gone else "leaves its run"
                self._announce(
                    first, f"rank {self._rank} {verb} with it", shows_own=not lost and not repeats
                )
            else:
                self._announced.acquire(blocking=False)
        elif self._announced.acquire(blocking=False):
            print_message(first.text if prints_traceback else first.headline)
            if first.explained or (prints_traceback and not first.interrupted_by):
                replace_traceback(exception)
            # Time for other ranks to read the report before this process ends, perhaps with the
            # store.
            time.sleep(2 * self._poll_s)
        return lost and first.rank != self._rank

    def report_child(self, rank: int, summary: str) -> None:
        """Report the end of another rank's process on this node, and print the first failure."""
        failure = Failure(rank, socket.gethostname(), summary, gone=True)
        self._announce(self._publish(failure), "ending the job")

    def _publish(self, failure: Failure) -> Failure:
        """Write ``failure`` unless the store has a report already. Return the report in the
        store.
        """
        try:
            first = self._store.compare_set(_FAILURE, "", json.dumps(asdict(failure)))
            self._store.set(_ALARM, "1")
            return Failure(**json.loads(first))
        except RuntimeError as error:
            return self._lost_store(error)

    def _poll(self, *, answering: bool = False) -> Failure | None:
        """Return the reported failure, if any. If ``answering``, answer a liveness check."""
        try:
            if not self._store.check([_ALARM]):
                return None
            if self._store.check([_FAILURE]):
                return Failure(**json.loads(self._store.get(_FAILURE)))
            if answering:
                self._answer()
            return None
        except RuntimeError as error:
            return self._lost_store(error)

    def _answer(self) -> None:
        """Answer the liveness check of this run, once."""
        if not self._answered:
            self._answered = True
            self._store.set(f"alive/{self._rank}", "1")
            self._store.add("alive", 1)

    def _lost_store(self, error: RuntimeError) -> Failure:
        host = "torchrun's agent" if "TORCHELASTIC_RUN_ID" in os.environ else "rank 0"
        return Failure(
            -1,
            "",
            f"{host}, which keeps the job's store, has ended ({str(error).splitlines()[0]})",
            gone=True,
        )

    def _find_cause(self) -> Failure | None:
        """Wait for the cause of a lost connection, in the main thread. None: all ranks are alive,
        and no rank reports a cause.
        """
        deadline = time.monotonic() + self._liveness_s
        own_rank = str(self._rank).encode()
        try:
            self._store.set(_ALARM, "1")
            is_first = self._store.compare_set("caller", "", str(self._rank)) == own_rank
            while (failure := self._poll()) is None:
                time.sleep(self._poll_s)
                if self._store.add("alive", 0) == self._world_size:
                    return None
                late_s = time.monotonic() - deadline
                if late_s > 0 and is_first:  # only a single rank reads the list
                    dead = self._find_dead()
                    return None if dead is None else self._publish(dead)
                if late_s > self._liveness_s:
                    return None
            return failure
        except RuntimeError as error:
            return self._lost_store(error)

    def _find_dead(self) -> Failure | None:
        """Return the failure of the ranks without an answer, if any."""
        absent = [
            rank for rank in range(self._world_size) if not self._store.check([f"alive/{rank}"])
        ]
        if not absent:
            return None
        key = f"host/{absent[0]}"
        host = self._store.get(key).decode() if self._store.check([key]) else "an unknown host"
        other_ranks = f", nor do ranks {', '.join(map(str, absent[1:9]))}" if absent[1:] else ""
        return Failure(
            absent[0],
            host,
            f"it no longer answers{other_ranks}: its process was killed, or its node is gone",
            gone=True,
        )

    def _look_for_dead(self) -> None:
        """Run a liveness check from the watch's thread, and report the ranks without an answer."""
        deadline = time.monotonic() + self._liveness_s
        with suppress(RuntimeError):  # the store has ended, as the next poll finds
            self._store.set(_ALARM, "1")
            while self._poll(answering=True) is None and not self._stopped.wait(self._poll_s):
                if self._store.add("alive", 0) >= self._world_size:
                    return
                if time.monotonic() > deadline:
                    dead = self._find_dead()
                    if dead is not None:
                        self._grace_s = min(self._grace_s, _DEAD_GRACE_S)
                        self._publish(dead)
                    return

    def _watch(self) -> None:
        while not self._stopped.wait(self._poll_s):
            if signal.SIGTERM in self._signals.received():
                self._look_for_dead()
            failure = self._poll(answering=True) or self._find_lone_ranks()
            if failure is None:
                continue
            if self._stopped.is_set() or (failure.rank == self._rank and self._leaving.is_set()):
                return
            if failure.is_lost_store and self._stopped.wait(self._grace_s):
                return  # the end of an ordinary run: another process ended earlier
            if self._unblock is not None and not failure.gone:
                self._wake(failure)
                return
            self._announce(failure, f"rank {self._rank} ends, because it would wait forever")
            # No exception reaches a main thread blocked in a collective. After an error of this
            # rank, the main thread may handle the error (all ranks may be saving). After the loss
            # of peers, the main thread would wait for the peers in a callback as well.
            if not self._leaving.wait(self._grace_s) or (
                self._follows and not self._stopped.wait(self._grace_s)
            ):
                end_process(self._write_logs)
            return

    def _find_lone_ranks(self) -> Failure | None:
        """Report ranks that wait for each other, on rank 0."""
        try:
            failure = None if self._lone_ranks is None else self._lone_ranks.look()
        except RuntimeError as error:
            return self._lost_store(error)
        if failure is None:
            return None
        first = self._publish(failure)
        if first == failure:
            print_message(failure.text)
        return first

    def _wake(self, failure: Failure) -> None:
        """Wake the main thread, to leave the run. End the process if the main thread does not
        leave.
        """
        self._announce(failure, f"rank {self._rank} leaves its run to start again")
        if self._unblock is not None and not self._leaving.wait(self._poll_s):
            self._unblock()
        if not self._leaving.wait(_WAKE_S):
            end_process(self._write_logs)

    def _announce(self, failure: Failure, consequence: str, *, shows_own: bool = False) -> None:
        """Print ``failure`` once, unless the failing rank prints on this node. Only a single rank
        prints the failing rank's traceback.
        """
        if not self._announced.acquire(blocking=False):
            return
        is_here = failure.host == socket.gethostname()
        if is_here and failure.printed and not shows_own:
            return
        # The failing rank prints the traceback on the rank's node.
        prints = self._rank == (1 if failure.rank == 0 else 0)
        details = failure.details if prints and not is_here else ""
        print_message(f"{failure.headline}; {consequence}\n{details}".rstrip())
