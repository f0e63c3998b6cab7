"""One rank's failure ends all ranks within seconds, with that rank's reason on screen.

Every rank runs a watching thread. A rank that raises publishes its traceback in the job's key-value store; the others read it
there, print it and end, even if they are blocked in a collective. No collective is used, so it works while they hang. A rank
that is killed outright is noticed by its launcher (ours, torchrun's or Slurm's); a rank whose parent or store is gone ends
itself.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback

import torch.distributed as dist

from megatron_lightning import compat

_POLL_S = 0.5
_GRACE_S = 2.0
"""Time in which a rank may end by itself after another one's failure, before it is made to."""
_KEY = "megatron_lightning/failure"


class FailureWatch:
    """Watches for failures of other ranks, and publishes this rank's."""

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        self._store = compat.clone_store(dist.distributed_c10d._get_default_store())
        self._parent = os.getppid()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="megatron-failure-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; the thread is gone afterwards."""
        self._stopped.set()
        self._thread.join()

    def report(self, error: BaseException) -> None:
        """Publish why this rank fails, then break its connections, so that nobody waits for it."""
        position = getattr(error, "pipeline_position", None)
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        reason = f"rank {self._rank} failed{f' at {position}' if position else ''}:\n{text}"
        try:
            if not self._store.check([_KEY]):
                self._store.set(_KEY, reason)
        except RuntimeError as lost:
            print(f"megatron-lightning: could not tell the other ranks: {lost}", file=sys.stderr, flush=True)
        self._stopped.set()
        compat.abort_process_groups()

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_S):
            reason = self._reason()
            if reason is not None:
                self._end(reason)
                return

    def _reason(self) -> str | None:
        if os.getppid() != self._parent:
            return "the process that started this rank is gone"
        try:
            return self._store.get(_KEY).decode() if self._store.check([_KEY]) else None
        except RuntimeError:
            return "rank 0, which keeps the job's key-value store, is gone"

    def _end(self, reason: str) -> None:
        if self._stopped.wait(_GRACE_S):
            return
        print(f"megatron-lightning: rank {self._rank} ends, because {reason}", file=sys.stderr, flush=True)
        os._exit(1)
