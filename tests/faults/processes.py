"""Run a job of several processes as a user does, to the end of the last of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """A job that is over."""

    code: int
    """Its exit code."""
    output: str
    """Output of its processes."""
    elapsed_s: float
    """Seconds from the fault to the end of its last process, as :func:`since_fault` counts them."""


def run_to_the_end(arguments: Sequence[str], timeout_s: float = 200.0) -> Ended:
    """Run ``python <arguments>`` in the repository.

    Raises:
        AssertionError: If the job takes longer, or processes of it are left when its output has
            ended; they are killed.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        # Returns when the last process has closed its end of the pipe.
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        _kill(_session(process.pid))
        output, _ = process.communicate()
        raise AssertionError(f"the job still ran after {timeout_s} s\n{output}") from error
    elapsed_s = since_fault(output)
    # A process closes its files a little before it is gone.
    _, left = psutil.wait_procs(_session(process.pid), timeout=5)
    _kill(left)
    assert not left, f"the job left {left}\n{output}"
    return Ended(process.returncode, output, elapsed_s)


def since_fault(output: str) -> float:
    """Return the seconds since the fault, which the job announces (``FAULT <time>``); 0 without
    one.

    They are counted as on a machine whose processors are the job's. A process may say how many
    seconds had passed and how many it had computed when it had imported what it needs (``STARTED
    <passed> <computed>``), which is computation alone; what it got of a processor then, the least
    of all processes, is what seconds are counted at.
    """
    fault_at = re.search(r"FAULT (\S+)", output)
    shares = [
        float(computed) / float(passed)
        for passed, computed in re.findall(r"STARTED ([\d.]+) ([\d.]+)", output)
    ]
    return (time.time() - float(fault_at[1])) * min([1.0, *shares]) if fault_at else 0.0


def _session(number: int) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _belongs(process, session=number)]


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _belongs(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
