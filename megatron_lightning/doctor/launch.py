"""Ranks of torchrun or Slurm, or new processes of this node."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_lightning import compat
from megatron_lightning.errors import ConfigError
from megatron_lightning.resilience.workers import run_workers

_MEETING = timedelta(seconds=60)
_FIRST_PORT, _NUM_PORTS = 15000, 10000

Work = Callable[..., Any]
"""Function of this rank's device and arguments. Rank 0's result is plain data."""


class Launcher(NamedTuple):
    """Who started this process."""

    name: str
    rank: int
    world_size: int
    local_rank: int
    init_method: str

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> Launcher | None:
        """Return the launcher of all ranks. None: this process is alone."""
        if "RANK" in environment and "WORLD_SIZE" in environment:
            rank, size = (int(environment[name]) for name in ("RANK", "WORLD_SIZE"))
            local_rank = int(environment.get("LOCAL_RANK", "0"))
            return cls("torchrun", rank, size, local_rank, "env://")
        tasks = int(environment.get("SLURM_NTASKS", "1"))
        if tasks == 1 or "SLURM_PROCID" not in environment:
            return None
        nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", ""))
        address = environment.get("MASTER_ADDR") or first_host(nodes)
        job = int(environment.get("SLURM_JOB_ID", "0"))
        port = environment.get("MASTER_PORT") or str(_FIRST_PORT + job % _NUM_PORTS)
        rank, local_rank = (int(environment[name]) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
        return cls("Slurm", rank, tasks, local_rank, f"tcp://{address}:{port}")


def first_host(nodes: str) -> str:
    """Return the first name in Slurm's list of nodes: ``n01`` of ``n[01-04,7],m1``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise ConfigError(
            f"Slurm's list of nodes is {nodes!r}, which names no host to meet at. Set MASTER_ADDR."
        )
    return "".join(part or "" for part in match.groups())


def run_on_ranks(work: Work, arguments: tuple[Any, ...], num_devices: int) -> Any:
    """Return the result of ``work`` on rank 0. None on other ranks.

    Args:
        work: Function of the device and the arguments.
        arguments: Plain data.
        num_devices: Ranks to start without a launcher.
    """
    launcher = Launcher.find()
    if launcher is not None:
        return _join(work, arguments, launcher)
    if num_devices == 1:
        return work(_device(0), *arguments)
    with tempfile.TemporaryDirectory() as folder:
        run_workers(_worker, (work, arguments, num_devices, folder), num_devices)
        return torch.load(Path(folder, "result"), weights_only=True)


def _worker(
    rank: int, work: Work, arguments: tuple[Any, ...], num_devices: int, folder: str
) -> None:
    launcher = Launcher("plain", rank, num_devices, rank, f"file://{folder}/store")
    result = _join(work, arguments, launcher)
    if rank == 0:
        torch.save(result, Path(folder, "result"))


def _join(work: Work, arguments: tuple[Any, ...], launcher: Launcher) -> Any:
    device = _device(launcher.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        init_method=launcher.init_method,
        rank=launcher.rank,
        world_size=launcher.world_size,
        timeout=_MEETING,
    )
    try:
        result = work(device, *arguments)
        return result if launcher.rank == 0 else None
    finally:
        compat.destroy_process_groups()


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())
