"""Run a test in several processes in step: each of them runs the whole test, as the ranks of a
script do.

The processes are forks of the test runner, made when the fixtures stand; so they share ``tmp_path``
and the random state.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple

from lightning.fabric.plugins import ClusterEnvironment

from tests.helpers.slurm import free_port

_GRACE_S = 10.0  # for a rank to meet the end of another one


class Outcome(NamedTuple):
    """How the test ended on one rank."""

    state: str
    """``passed``, ``skipped``, ``failed``; or ``followed``: the rank was ended because of what
    another one met."""
    text: str = ""
    """Why: the end of the traceback."""


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
    deadline = time.monotonic() + timeout_s
    outcomes = []
    for pid, pipe in zip(pids, pipes, strict=True):
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                outcomes.append(pickle.loads(pipe.recv_bytes()))
            else:
                outcomes.append(
                    Outcome("failed", "still running; ended (its stacks are on stderr)")
                )
                os.kill(pid, signal.SIGABRT)
        except EOFError:
            outcomes.append(Outcome("failed", "the process ended without a word"))
        if outcomes[-1].state == "failed":
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    return outcomes


def _be_rank(environment: InStep, test: Callable[[InStep], Any], pipe: Connection) -> None:
    faulthandler.enable(all_threads=True)
    try:
        test(environment)
        outcome = Outcome("passed")
    except BaseException as error:  # the outcomes of pytest's skip, xfail and fail among them
        states = {"Skipped": "skipped", "XFailed": "skipped", "PeerFailure": "followed"}
        state = states.get(type(error).__name__, "failed")
        outcome = Outcome(
            state, str(error) if state == "skipped" else traceback.format_exc()[-6000:]
        )
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()
    os._exit(0)
