"""Run a test in several processes in step: each of them runs the whole test, as the ranks of a script do.

The processes are forks of the test runner, made when the fixtures stand; so they share ``tmp_path`` and the random state.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment

from tests.helpers.slurm import free_port

_GRACE_S = 10.0  # for a rank to meet the end of another one


@dataclass(frozen=True)
class Outcome:
    """How the test ended on one rank."""

    state: str
    """``passed``, ``skipped``, ``failed``; or ``followed``: the rank was ended because of what the other one met."""
    text: str = ""
    """Why."""

    @property
    def summary(self) -> str:
        """The error alone, in one line."""
        lines = [line for line in self.text.splitlines() if line and not line[0].isspace()]
        ends = ("Error", "Exception", "Exit", "Failed", "Failure")
        errors = [line for line in lines if line.partition(":")[0].endswith(ends)]
        return (errors or lines or [""])[-1][:220]


class InStep(ClusterEnvironment):
    """One of the processes; environment variables, which tests clear, play no part."""

    creates_processes_externally = True
    main_address = "127.0.0.1"

    def __init__(self, rank: int, size: int, port: int) -> None:
        self._rank, self._size, self._port = rank, size, port

    @property
    def main_port(self) -> int:
        return self._port

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._size

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0


def run_in_step(size: int, test: Callable[[InStep], Any], timeout_s: float) -> list[Outcome]:
    """Run ``test`` in ``size`` forks and return how it ended in each."""
    port = int(free_port())
    pids, pipes = [], []
    for rank in range(size):
        here, there = Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            _be_rank(InStep(rank, size, port), test, there)
        there.close()
        pids.append(pid)
        pipes.append(here)
    try:
        return _outcomes(pids, pipes, timeout_s)
    finally:
        for pid in pids:
            os.waitpid(pid, 0)


def _outcomes(pids: list[int], pipes: list[Connection], timeout_s: float) -> list[Outcome]:
    found: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout_s
    while len(found) < len(pids):
        missing = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in found}
        ready = wait(list(missing), max(0.0, deadline - time.monotonic()))
        for pipe in ready:
            try:
                found[missing[pipe]] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                found[missing[pipe]] = Outcome("failed", "the process ended without a word")
        if any(outcome.state == "failed" for outcome in found.values()):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if not ready:
            for rank in missing.values():
                found[rank] = Outcome("failed", "still running; ended (its stacks are on stderr)")
                os.kill(pids[rank], signal.SIGABRT)
    return [found[rank] for rank in range(len(pids))]


def _be_rank(environment: InStep, test: Callable[[InStep], Any], pipe: Connection) -> None:
    faulthandler.enable(all_threads=True)
    try:
        test(environment)
        outcome = Outcome("passed")
    except BaseException as error:  # the outcomes of pytest's skip, xfail and fail among them
        states = {"Skipped": "skipped", "XFailed": "skipped", "PeerFailure": "followed"}
        state = states.get(type(error).__name__, "failed")
        outcome = Outcome(state, str(error) if state == "skipped" else _last_lines(error))
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()
    os._exit(0)


def _last_lines(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-6000:]
