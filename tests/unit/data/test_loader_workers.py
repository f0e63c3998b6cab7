"""DataLoader workers ignore signals to the job, and end with their rank."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from torch.utils.data import DataLoader, Dataset, get_worker_info

from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.resilience.loader_workers import EndWithRank
from megatron_lightning.strategies import MegatronStrategy
from megatron_lightning.strategies.step.loaders.dataloaders import prepared_loader
from tests.faults.processes import ROOT
from tests.helpers.trainers import trainer


def _told(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset[:] = [value + 100 for value in info.dataset]


@pytest.mark.parametrize("context", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_a_signal_to_the_job_ends_no_worker(context: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun and Slurm signal every process."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "4")  # threads older than the worker's own code
    loader = DataLoader(
        list(range(20)), batch_size=None, num_workers=1, prefetch_factor=1,
        worker_init_fn=copy.deepcopy(EndWithRank(_told, signal.SIGHUP)),
        multiprocessing_context=context,
    )  # fmt: skip
    batches: Any = iter(loader)
    assert next(batches) == 100
    [worker] = batches._workers
    for name in ("TERM", "USR1", "HUP") * 3:
        subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)  # not by this process
    assert list(batches) == list(range(101, 120))


def test_workers_of_a_run_ignore_the_requeue_signal_of_its_job() -> None:
    """Lightning's own example requeues by SIGHUP."""
    run = trainer(MegatronStrategy(), plugins=[SLURMEnvironment(requeue_signal=signal.SIGHUP)])
    loader: Any = prepared_loader(
        DataLoader(list(range(9)), batch_size=None, num_workers=1, worker_init_fn=_told),
        run, AxisGroup("dp", (0,), 0, None), injects_samplers=False, consumed=0,
        micro_batch_size=None,
    )  # fmt: skip
    batches = iter(loader)
    assert next(batches) == 100
    [worker] = batches._workers
    subprocess.run(["kill", "-HUP", str(worker.pid)], check=True)
    time.sleep(0.2)
    assert worker.is_alive() and list(batches) == list(range(101, 109))


class _Programs(Dataset[int]):
    """Samples made by another program, which is ended when its output is read."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        return program.wait(10)


def test_a_program_of_the_dataset_obeys() -> None:
    loader = DataLoader(
        _Programs(), batch_size=None, num_workers=1, worker_init_fn=EndWithRank(None)
    )
    assert list(loader) == [-15, -15]


_RANK = """
import os, sys, time, torch
from torch.utils.data import DataLoader
from megatron_lightning.resilience.loader_workers import EndWithRank

class Slow(list):
    def __getitem__(self, i):
        time.sleep(60 if i else 0)
        return i

def begin():
    loader = DataLoader(Slow(range(9)), None, num_workers=2, worker_init_fn=EndWithRank(None))
    batches = iter(loader)
    next(batches)
    print(*[worker.pid for worker in batches._workers], flush=True)
    return batches

if __name__ == "__main__":
    from torch.utils.data import dataloader
    dataloader._utils.MP_STATUS_CHECK_INTERVAL = 0.1  # seconds that torch waits for a worker
    begin()
    sys.stdin.readline()
    batches = begin()
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), 9)
"""


@pytest.mark.spread(1)
@pytest.mark.parametrize("end", ["exit", "killed"])
def test_workers_end_with_their_loader_and_with_their_rank(end: str, tmp_path: Path) -> None:
    """Even in the middle of a sample that takes long."""
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    command = [sys.executable, str(script), end]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as rank:
        assert rank.stdin is not None and rank.stdout is not None
        try:
            _wait_for_two(rank.stdout.readline())
            assert rank.poll() is None  # the loader is dropped, and the rank goes on
            print(file=rank.stdin, flush=True)
            _wait_for_two(rank.stdout.readline())
        finally:
            rank.kill()


def _wait_for_two(pids: str) -> None:
    """Wait for the end of both workers."""
    left = [int(pid) for pid in pids.split()]
    assert len(left) == 2
    deadline = time.monotonic() + 10
    while (left := [pid for pid in left if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
