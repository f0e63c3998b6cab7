"""The launcher of this process: torchrun, Slurm, or a command that started its own ranks.

Launchers speak by environment variables, and this file alone reads the ranks from them, for every
command that runs without a Trainer. Lightning reads them for ``fit``.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_lightning import compat
from megatron_lightning.errors import ConfigError
from megatron_lightning.resilience.workers import run_workers

_FIRST_PORT, _NUM_PORTS = 15000, 10000

Work = Callable[..., Any]
"""Function of this rank's device and arguments. Rank 0's result is plain data."""


class Launcher(NamedTuple):
    """Position of this process among the started processes."""

    name: str
    rank: int
    world_size: int
    local_rank: int
    init_method: str
    """Address at which the ranks meet, for ``init_process_group``."""

    @classmethod
    def of_worker(cls, rank: int, world_size: int, folder: str) -> Launcher:
        """Return the launcher of a worker process of this node.

        Args:
            rank: Rank of the process.
            world_size: Number of workers.
            folder: Folder where the ranks meet, equal for all of them.
        """
        return cls("workers", rank, world_size, rank, f"file://{folder}/store")

    @contextmanager
    def joined(self, device_type: str, timeout: timedelta | None = None) -> Iterator[torch.device]:
        """Join the default process group of all ranks during the block. Yield this rank's device.

        Args:
            device_type: "cuda" or "cpu".
            timeout: Limit of every collective. None: torch's default.
        """
        device = local_device(device_type, self.local_rank)
        if device_type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
            init_method=self.init_method,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
        )
        try:
            yield device
        finally:
            compat.destroy_process_groups()


def find(environment: Mapping[str, str] = os.environ) -> Launcher | None:
    """Return the launcher that started several processes. None: this process is alone.

    torchrun's variables win over Slurm's, since torchrun may run inside of a Slurm task.

    Raises:
        ConfigError: If Slurm's list of nodes names no host.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, size = (int(environment[name]) for name in ("RANK", "WORLD_SIZE"))
        return Launcher("torchrun", rank, size, int(environment.get("LOCAL_RANK", "0")), "env://")
    # srun starts as many tasks as its step has, which may be fewer than the job's.
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1")))
    if tasks == 1 or "SLURM_PROCID" not in environment:
        return None
    nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", ""))
    address = environment.get("MASTER_ADDR") or first_host(nodes)
    job = int(environment.get("SLURM_JOB_ID", "0"))
    port = environment.get("MASTER_PORT") or str(_FIRST_PORT + job % _NUM_PORTS)
    rank, local_rank = (int(environment[name]) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
    return Launcher("Slurm", rank, tasks, local_rank, f"tcp://{address}:{port}")


def local_device(device_type: str, local_rank: int = 0) -> torch.device:
    """Return the device of a rank of this node. More ranks than GPUs share GPUs.

    Args:
        device_type: "cuda" or "cpu".
        local_rank: Position of the rank on the node.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, local_rank % torch.cuda.device_count())


def first_host(nodes: str) -> str:
    """Return the first name in Slurm's list of nodes: ``n01`` of ``n[01-04,7],m1``.

    Raises:
        ConfigError: If the list names no host.
    """
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise ConfigError(
            f"Slurm's list of nodes is {nodes!r}, which names no host to meet at. Set MASTER_ADDR."
        )
    return "".join(part or "" for part in match.groups())


def run_on_ranks(
    work: Work,
    arguments: tuple[Any, ...],
    num_ranks: int,
    device_type: str,
    timeout: timedelta | None = None,
) -> Any:
    """Return the result of ``work`` on rank 0. None on other ranks.

    Args:
        work: Function of the device and the arguments.
        arguments: Travel to other processes.
        num_ranks: Ranks to start without a launcher.
        device_type: "cuda" or "cpu".
        timeout: Limit of every collective. None: torch's default.
    """
    started = find()
    if started is not None and started.world_size > 1:
        return _join(started, work, arguments, device_type, timeout)
    if started is not None or num_ranks == 1:
        return work(local_device(device_type), *arguments)
    with tempfile.TemporaryDirectory() as folder:
        run_workers(_worker, (num_ranks, folder, work, arguments, device_type, timeout), num_ranks)
        return torch.load(Path(folder, "result"), weights_only=True)


def _worker(rank: int, num_ranks: int, folder: str, *job: Any) -> None:
    result = _join(Launcher.of_worker(rank, num_ranks, folder), *job)
    if rank == 0:
        torch.save(result, Path(folder, "result"))


def _join(
    started: Launcher,
    work: Work,
    arguments: tuple[Any, ...],
    device_type: str,
    timeout: timedelta | None,
) -> Any:
    with started.joined(device_type, timeout) as device:
        result = work(device, *arguments)
        return result if started.rank == 0 else None
