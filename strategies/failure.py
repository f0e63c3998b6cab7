"""One rank's failure ends the whole job: its report travels through the store, never through a collective.

A rank that raises writes a report under one key of the job's key-value store; the first report stays, because the later ones
are mostly consequences of it. Every rank looks for that key from a thread. A rank that finds another rank's report, or loses
the store, prints it and ends its own process after a short grace, because it may sit in a collective that can never finish
and that no Python exception can reach.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import traceback
from dataclasses import asdict, dataclass

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from megatron_lightning import compat

_KEY = "failure"
_STORE_SECONDS_PER_RANK = 1e-3  # all ranks ask one store: at most about a thousand requests a second


class AgreedStop(SIGTERMException):
    """All ranks end the run here and know it: none has failed, and none waits for another."""


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
    """Traceback; empty for a process that was killed."""
    position: str = ""
    """Where in the pipeline schedule it happened; empty outside a schedule."""

    @property
    def headline(self) -> str:
        """One line that names the rank and the reason."""
        if self.rank < 0:
            return self.summary
        where = f" at {self.position}" if self.position else ""
        return f"rank {self.rank} on {self.host} failed{where}: {self.summary}"

    @classmethod
    def of(cls, rank: int, exception: BaseException) -> Failure:
        """Describe ``exception`` as raised on ``rank``."""
        summary = "".join(traceback.format_exception_only(exception)).strip().splitlines()
        details = "".join(traceback.format_exception(exception))
        position = str(getattr(exception, "pipeline_position", None) or "")
        return cls(rank, socket.gethostname(), summary[0], details, position)


class FailureWatch:
    """Reports this rank's failure to the others and ends this process when another rank failed.

    Every rank makes one after the default process group exists, starts it, and stops it at the end of the run. Watches of one
    process group are numbered, so that a failure which all ranks survived does not end their next run.

    Args:
        store: Key-value store of the job; None: the default process group's, over a connection of its own.
        rank: This process's global rank; None: as in the default process group.
        poll_s: Seconds between two looks at the store, for jobs of up to some hundred ranks.
        grace_s: Seconds that an ordinary way out has before the process is ended.
    """

    def __init__(
        self, store: compat.Store | None = None, rank: int | None = None, *, poll_s: float = 0.5, grace_s: float = 2.0
    ) -> None:
        store = compat.default_store() if store is None else store
        self._rank = dist.get_rank() if rank is None else rank
        number = store.add(f"megatron_lightning/watches/{self._rank}", 1)
        self._store = compat.PrefixStore(f"megatron_lightning/watch/{number}", store)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._poll_s, self._grace_s = max(poll_s, world_size * _STORE_SECONDS_PER_RANK), grace_s
        self._stopped, self._reported, self._announced = threading.Event(), threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="failure-watch", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; a no-op when stopped already."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def report(self, exception: BaseException) -> None:
        """Tell the other ranks that this one failed, and break its connections, so that they fail at once where they can.

        Prints the headline, or the first report if another rank was faster. This process is then left to its own way out: it
        has an exception to raise. An attribute ``pipeline_position`` of the exception becomes part of the report.
        """
        self._reported.set()
        first = self._publish(Failure.of(self._rank, exception))
        if first.rank != self._rank:
            self._announce(first, f"the error of rank {self._rank} is probably its consequence")
        elif self._announced.acquire(blocking=False):  # the others may be ended before they can say it
            print(f"megatron_lightning: {first.headline}", file=sys.stderr, flush=True)
        compat.abort_process_groups()

    def report_child(self, rank: int, summary: str) -> None:
        """Tell the other ranks that the process of another rank of this node ended."""
        self._publish(Failure(rank, socket.gethostname(), summary))

    def _publish(self, failure: Failure) -> Failure:
        """Write ``failure`` unless there is a report; return the report that stands."""
        try:
            return Failure(**json.loads(self._store.compare_set(_KEY, "", json.dumps(asdict(failure)))))
        except RuntimeError as error:
            return self._lost(error)

    def _look(self) -> Failure | None:
        try:
            return Failure(**json.loads(self._store.get(_KEY))) if self._store.check([_KEY]) else None
        except RuntimeError as error:
            return self._lost(error)

    def _lost(self, error: RuntimeError) -> Failure:
        host = "torchrun's agent" if "TORCHELASTIC_RUN_ID" in os.environ else "rank 0"
        return Failure(-1, "", f"{host}, which keeps the job's store, has ended ({str(error).splitlines()[0]})")

    def _watch(self) -> None:
        while not self._stopped.wait(self._poll_s):
            failure = self._look()
            if failure is None:
                continue
            if failure.rank == self._rank or self._reported.is_set() or self._stopped.is_set():
                return
            if failure.rank < 0 and self._stopped.wait(self._grace_s):
                return  # the end of an ordinary run: another process was a little faster
            self._announce(failure, f"rank {self._rank} ends, because it would wait for it forever")
            if not self._stopped.wait(self._grace_s) and not self._reported.is_set():
                os._exit(1)  # an exception cannot reach a main thread that waits in a collective
            return

    def _announce(self, failure: Failure, consequence: str) -> None:
        """Print ``failure`` once; its traceback is printed by one rank only."""
        if not self._announced.acquire(blocking=False):
            return
        details = failure.details if self._rank == (1 if failure.rank == 0 else 0) else ""
        print(f"megatron_lightning: {failure.headline}; {consequence}\n{details}", end="", file=sys.stderr, flush=True)
