"""Work on all ranks of a launcher, or on new processes of this node."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron_lightning.resilience import launcher
from megatron_lightning.resilience.launcher import Launcher
from megatron_lightning.resilience.workers import run_workers

_MEETING = timedelta(seconds=60)

Work = Callable[..., Any]
"""Function of this rank's device and arguments. Rank 0's result is plain data."""


def run_on_ranks(work: Work, arguments: tuple[Any, ...], num_devices: int) -> Any:
    """Return the result of ``work`` on rank 0. None on other ranks.

    Args:
        work: Function of the device and the arguments.
        arguments: Plain data.
        num_devices: Ranks to start without a launcher.
    """
    started = launcher.find()
    if started is not None:
        return _join(work, arguments, started)
    if num_devices == 1:
        return work(launcher.local_device(_device_type()), *arguments)
    with tempfile.TemporaryDirectory() as folder:
        run_workers(_worker, (work, arguments, num_devices, folder), num_devices)
        return torch.load(Path(folder, "result"), weights_only=True)


def _worker(
    rank: int, work: Work, arguments: tuple[Any, ...], num_devices: int, folder: str
) -> None:
    result = _join(work, arguments, Launcher.of_worker(rank, num_devices, folder))
    if rank == 0:
        torch.save(result, Path(folder, "result"))


def _join(work: Work, arguments: tuple[Any, ...], started: Launcher) -> Any:
    with started.joined(_device_type(), _MEETING) as device:
        result = work(device, *arguments)
        return result if started.rank == 0 else None


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
