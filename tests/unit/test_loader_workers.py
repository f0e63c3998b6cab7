"""DataLoader workers obey SIGTERM from their own rank alone."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import psutil
import pytest
from torch.utils.data import DataLoader, get_worker_info

from megatron_lightning.resilience.loader_workers import OnlyOwnRank


def _told(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.append(100 + worker)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_signal_to_the_job_ends_no_worker(context: str) -> None:
    """torchrun and Slurm signal every process."""
    loader = DataLoader(
        list(range(20)), batch_size=None, num_workers=1, worker_init_fn=OnlyOwnRank(_told),
        multiprocessing_context=context, prefetch_factor=1,
    )  # fmt: skip
    batches: Any = iter(loader)
    assert next(batches) == 0
    [worker] = batches._workers
    for name in ("TERM", "USR1"):
        subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)  # not by this process
    assert list(batches) == list(range(1, 20))


def test_the_rank_ends_its_workers() -> None:
    """As multiprocessing does at the end of an interpreter."""
    loader = DataLoader([0] * 20, batch_size=None, num_workers=1, worker_init_fn=OnlyOwnRank(None))
    batches: Any = iter(loader)
    next(batches)
    [process] = batches._workers
    worker = psutil.Process(process.pid)
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises for ended workers
    try:
        os.kill(worker.pid, signal.SIGTERM)
        process.join(10)
        assert process.exitcode == 0
    finally:
        signal.signal(signal.SIGCHLD, handler)
        batches._shutdown_workers()
