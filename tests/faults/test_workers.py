"""Worker processes, as ``generate`` starts them: all end with one that fails, and with the process
that started them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from megatron_lightning.resilience.workers import run_workers
from tests.faults.processes import ROOT


def work(rank: int, folder: str, fault: str) -> None:
    """Block until another process ends this one; rank 1 fails when both are here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # torch sends it when the starter is gone
    Path(folder, str(rank)).write_text(str(os.getpid()))
    if rank == 1 and fault != "none":
        started(folder)
        if fault == "raise":
            raise ValueError("the injected fault")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def started(folder: str | Path) -> list[int]:
    """Wait until both workers have started; return their process ids."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pids = [path.read_text() for path in sorted(Path(folder).iterdir())]
        if len(pids) == 2 and all(pids):
            return [int(pid) for pid in pids]
        time.sleep(0.05)
    raise TimeoutError("the workers have not started")


@pytest.mark.slow  # the end of the process that started them is the harder case
@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_workers_end_with_one_that_fails(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = {
        "kill": (ProcessExitedException, "SIGKILL"),
        "raise": (ProcessRaisedException, "the injected fault"),
    }[fault]
    with pytest.raises(expected[0], match=expected[1]):
        run_workers(work, (str(tmp_path), fault), 2)
    end = {"kill": "was killed by SIGKILL", "raise": "ended with exit code 1"}[fault]
    assert re.search(
        rf"rank 1 failed: its process \d+ {end}; ending the job\n", capsys.readouterr().err
    )
    assert not any(map(psutil.pid_exists, started(tmp_path)))


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    program = (
        "from tests.faults.test_workers import run_workers, work\nrun_workers(work, "
        f"({str(tmp_path)!r}, 'none'), 2)"
    )
    starter = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    pids = started(tmp_path)
    starter.kill()
    starter.wait()
    _, alive = psutil.wait_procs(
        [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=15
    )
    assert not alive
