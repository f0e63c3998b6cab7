"""Workers that run jobs side by side until a deadline. One that hangs or dies is replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO

from benchmarks import machine
from benchmarks.gpu.jobs import Job, Names, Result

_POLL_S = 1.0
START_S = 120.0
"""In which a worker imports its jobs."""
_STARTS = 3
"""Workers that may die or hang in a row before any of them has a job."""


class NoWorkerError(RuntimeError):
    """No worker can begin, while jobs are left."""

    def __init__(self, text: str, left: list[Job]) -> None:
        super().__init__(text)
        self.left = left


class Worker:
    """A process with a pipe, in a session of its own, so that its ranks end with it."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: IO[str]) -> None:
        self.pipe, theirs = Pipe()
        self.job: Job | None = None
        self.limit_s, self.since = START_S, time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.worker", str(theirs.fileno()), *command],
            cwd=machine.ROOT, env={**os.environ, **env}, pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        theirs.close()

    @property
    def deadline(self) -> float:
        """Time at which it is taken to hang."""
        return self.since + self.limit_s

    @property
    def elapsed_s(self) -> float:
        """Seconds of its job."""
        return time.monotonic() - self.since

    def start(self, job: Job) -> None:
        """Send a job."""
        self.job, self.limit_s, self.since = job, job.limit_s, time.monotonic()
        with contextlib.suppress(OSError):  # it died, and the pipe says so next
            self.pipe.send(job.name)

    def kill(self, patience_s: float = 0.0) -> int:
        """End the process, if it does not end by itself, and its ranks; return its exit code."""
        self.pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


@dataclass(frozen=True)
class Pool:
    """Workers of one kind."""

    command: Sequence[str]
    """Arguments of :mod:`benchmarks.gpu.worker` behind the descriptor."""
    size: int
    """Most workers at a time."""
    finish: Callable[[Job, Result], None]
    """Called after every job."""
    until: float
    """Of ``time.monotonic``: jobs that are expected to end later are left."""
    deadline: float
    """Of ``time.monotonic``: running jobs are cut."""
    log: Path
    """Takes what the workers print."""
    env: Mapping[str, str]
    """Added to the environment."""

    def run(self, choose: Callable[[Names], list[Job]]) -> list[Job]:
        """Run jobs side by side; return those that were left or cut.

        Args:
            choose: Returns the jobs, in their order, from what a worker can run.

        Raises:
            NoWorkerError: If no worker can import the jobs.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as log:
            run = _Run(self, choose, log)
            try:
                return run.loop()
            finally:
                for worker in run.workers:
                    worker.kill()


class _Run:
    """The workers and the queue of a pool."""

    def __init__(self, pool: Pool, choose: Callable[[Names], list[Job]], log: IO[str]) -> None:
        self.pool, self.choose, self.log = pool, choose, log
        self.workers: list[Worker] = []
        self.queue: deque[Job] | None = None
        """None: no worker has said which jobs there are."""
        self.left: list[Job] = []
        self.failed_starts = 0

    def loop(self) -> list[Job]:
        """Hear the workers until there is nothing to do, or no time."""
        self._hire(1)
        while self.workers and time.monotonic() < self.pool.deadline:
            first = min(self.pool.deadline, *(worker.deadline for worker in self.workers))
            patience_s = min(_POLL_S, max(0.0, first - time.monotonic()))
            ready = wait([worker.pipe for worker in self.workers], patience_s)
            for worker in list(self.workers):
                if worker.pipe in ready:
                    self._hear(worker)
                elif time.monotonic() >= worker.deadline:
                    self._replace(worker, f"no result within {worker.limit_s:.0f} s")
        return self._open()

    def _open(self) -> list[Job]:
        """Return the jobs that have not ended."""
        cut = [worker.job for worker in self.workers if worker.job is not None]
        return [*self.left, *cut, *(self.queue or [])]

    def _hire(self, number: int) -> None:
        for _ in range(number):
            self.workers.append(Worker(self.pool.command, self.pool.env, self.log))

    def _hear(self, worker: Worker) -> None:
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):
            self._replace(worker, "the worker died", patience_s=2.0)
            return
        if isinstance(message, Names):
            self._begin(message)
        elif worker.job is not None:
            self.pool.finish(worker.job, message)
            worker.job = None
        job = self._next()
        if job is None:
            self._dismiss(worker)
        else:
            worker.start(job)

    def _begin(self, names: Names) -> None:
        self.failed_starts = 0
        if self.queue is None:
            self.queue = deque(self.choose(names))
            self._hire(min(self.pool.size, len(self.queue)) - 1)

    def _next(self) -> Job | None:
        queue = self.queue or deque()
        turn_taken = any(worker.job and worker.job.takes_turns for worker in self.workers)
        for job in list(queue):
            if job.takes_turns and turn_taken:
                continue  # the worker that has the turn goes on with it
            queue.remove(job)
            if time.monotonic() + job.seconds <= self.pool.until:
                return job
            self.left.append(job)
        return None

    def _dismiss(self, worker: Worker, patience_s: float = 0.0) -> int:
        self.workers.remove(worker)
        return worker.kill(patience_s)

    def _replace(self, worker: Worker, why: str, patience_s: float = 0.0) -> None:
        code = self._dismiss(worker, patience_s)
        text = f"{why}; its exit code is {code}. {self.pool.log} has what it printed."
        if worker.job is not None:
            self.pool.finish(worker.job, Result("failed", worker.elapsed_s, text))
        else:
            self.failed_starts += 1
        if self.queue is not None and not self.queue:
            return
        if self.failed_starts < _STARTS:
            self._hire(1)
        elif not self.workers:
            text = f"{self.failed_starts} workers did not begin: {text}"
            raise NoWorkerError(text, self._open())
