"""Run a job of several processes as a user does, to the end of the last of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """A job that is over."""

    code: int
    """Its exit code."""
    output: str
    """What its processes wrote."""
    elapsed_s: float
    """Seconds from the fault, which the job announces (``FAULT <time>``), to the end of its last process; 0 without one."""


def run_to_the_end(arguments: Sequence[str], timeout_s: float = 200.0) -> Ended:
    """Run ``python <arguments>`` in the repository.

    Raises:
        AssertionError: If processes of the job are left when its output has ended.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    output, _ = process.communicate(timeout=timeout_s)  # returns when the last process has closed its end of the pipe
    fault_at = re.search(r"FAULT (\S+)", output)
    elapsed_s = time.time() - float(fault_at[1]) if fault_at else 0.0
    ending = [other for other in psutil.process_iter() if _belongs(other, session=process.pid)]
    _, left = psutil.wait_procs(ending, timeout=5)  # a process closes its files a little before it is gone
    for other in left:
        other.kill()
    assert not left, f"the job left {left}\n{output}"
    return Ended(process.returncode, output, elapsed_s)


def _belongs(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
