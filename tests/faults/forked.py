"""Processes of a faulty job, forked from one that has imported everything: no start costs imports.

Everything else is as if they had been started as programs: sessions, environments, output, signals,
exit codes, and what runs at the end of an interpreter.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from lightning.fabric.strategies.launchers import subprocess_script as fabric_script
from lightning.pytorch.strategies.launchers import subprocess_script
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.faults import faulty_job


def task(arguments: Sequence[str], environment: Mapping[str, str], output: str) -> None:
    """Run the job as a process of its own."""
    _become(arguments, environment, output)
    faulty_job.main()


def starter(arguments: Sequence[str], environment: Mapping[str, str], output: str) -> None:
    """Run the job as ``python train.py`` does, which runs its command again for other ranks."""
    _become(arguments, environment, output)
    for module in (subprocess_script, fabric_script):
        vars(module)["subprocess"] = _Processes
    faulty_job.main()


def agent(arguments: Sequence[str], environment: Mapping[str, str], output: str) -> None:
    """Run the job under torchrun's agent, with forked workers."""
    _become(arguments, environment, output)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=4, run_id=f"forty-{os.getpid()}",
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=2, start_method="fork",
    )  # fmt: skip
    elastic_launch(config, _worker)(*arguments)


def _worker(*arguments: str) -> None:
    sys.argv = ["faulty_job.py", *arguments]
    try:
        faulty_job.main()
    except SystemExit as error:
        if error.code not in (None, 0):
            raise


def _become(arguments: Sequence[str], environment: Mapping[str, str], output: str) -> None:
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [faulty_job.__file__, *arguments]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Fork:
    """A child that runs the job again, with the interface of ``subprocess.Popen``."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], **_: Any) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.environ.clear()
            os.environ.update(env)
            os._exit(_to_the_end(faulty_job.main))

    def poll(self) -> int | None:
        """Return the exit code. None: the child runs."""
        if self.returncode is None:
            with suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Send a signal to a child that runs."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """Kill the child."""
        self.send_signal(signal.SIGKILL)


class _Processes:
    """Stands for the module ``subprocess`` in Lightning's launchers."""

    Popen = _Fork
    TimeoutExpired = subprocess.TimeoutExpired


def _to_the_end(main: Callable[[], None]) -> int:
    """Run a program and what an interpreter runs at its end. Return the exit code."""
    code = 0
    try:
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    vars(threading)["_shutdown"]()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code
