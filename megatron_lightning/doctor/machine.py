"""Speed of every rank's device against its peers and its peak: the slow GPU, before the run."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from megatron_lightning.doctor.links import timed
from megatron_lightning.planning.search.peaks import peak_flops

_ROWS: Mapping[str, int] = MappingProxyType({"cuda": 8192, "cpu": 512})
"""Rows of the matrices, by device type."""
_NUM_BYTES: Mapping[str, int] = MappingProxyType({"cuda": 1 << 30, "cpu": 1 << 26})
_MOST_REPEATS = 100
_SLOW = 0.9  # of the median rank: GPUs of one kind are equally fast; so is their memory
UNITS: Mapping[str, str] = MappingProxyType(
    {"gemm": "TFLOP/s", "memory": "GB/s", "host_to_device": "GB/s"}
)
"""Test -> unit of its speed."""
VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1 with tensor or context parallelism before Blackwell, "
        "unset with fsdp",
        "NCCL_ALGO": "unset; ^NVLS with deterministic=True",
        "NCCL_DEBUG": "unset, or WARN",
        "NCCL_IB_DISABLE": "unset, or 0 with InfiniBand",
        "NCCL_NVLS_ENABLE": "unset",
        "NCCL_P2P_DISABLE": "unset, or 0",
        "NCCL_SOCKET_IFNAME": "the interface of the cluster's network, if there are several",
        "GLOO_SOCKET_IFNAME": "as NCCL_SOCKET_IFNAME",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "unset",
        "TORCH_NCCL_BLOCKING_WAIT": "unset, or 0",
        "CUDA_LAUNCH_BLOCKING": "unset, or 0",
        "PYTORCH_ALLOC_CONF": "unset, or expandable_segments:True",
        "OMP_NUM_THREADS": "at most the cores for each rank",
    }
)
"""Variable that changes speed or chooses hardware -> value that a run expects."""


def measure_machine(device: torch.device, seconds: float) -> list[dict[str, Any]]:
    """Return a row for each test, on rank 0: the speed of the slowest rank's device, where it is,
    the median, and the peak. A collective of all ranks.

    Args:
        device: Device of this rank.
        seconds: Time of all tests together.
    """
    own: dict[str, Any] = {
        "host": socket.gethostname(),
        "speeds": {name: test() for name, test in _tests(device, seconds).items()},
    }
    ranks = [own]
    if dist.is_initialized():
        ranks = [{} for _ in range(dist.get_world_size())]  # filled in place
        dist.all_gather_object(ranks, own)
    peak = peak_flops(torch.cuda.get_device_name(device), "bf16") if device.type == "cuda" else None
    rows = []
    for name in own["speeds"]:
        speeds = sorted((one["speeds"][name], rank) for rank, one in enumerate(ranks))
        (slowest, rank), (median, _) = speeds[0], speeds[len(speeds) // 2]
        rows.append(
            {
                "test": name,
                "slowest": slowest,
                "median": median,
                "is_slow": slowest < _SLOW * median,
                "peak": peak / 1e12 if peak is not None and name == "gemm" else None,
                "rank": rank,
                "host": ranks[rank]["host"],
            }
        )
    return rows


def variables() -> dict[str, dict[str, str | None]]:
    """Return variables with their value in this process, and the expected value."""
    return {
        name: {"value": os.environ.get(name), "expected": expected}
        for name, expected in VARIABLES.items()
    }


def _tests(device: torch.device, seconds: float) -> dict[str, Callable[[], float]]:
    """Return test -> function that returns the speed of this rank's device."""
    is_gpu = device.type == "cuda"
    size, num_bytes = _ROWS[device.type], _NUM_BYTES[device.type]
    budget = seconds / (3 if is_gpu else 2)

    def gemm() -> float:
        a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if is_gpu else None)
        out = torch.empty_like(a)
        return 2 * size**3 / 1e12 / _seconds(lambda: torch.mm(a, a, out=out), budget, device)

    def memory() -> float:
        source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return 2 * num_bytes / 1e9 / _seconds(lambda: target.copy_(source), budget, device)

    def host_to_device() -> float:
        source = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        copy = _seconds(lambda: target.copy_(source, non_blocking=True), budget, device)
        return num_bytes / 1e9 / copy

    tests = {"gemm": gemm, "memory": memory}
    return {**tests, "host_to_device": host_to_device} if is_gpu else tests


def _seconds(function: Callable[[], object], budget: float, device: torch.device) -> float:
    """Return the seconds of a call, the mean of as many as fit the budget."""
    function()
    once = timed(function, 1, device)
    repeats = max(1, min(_MOST_REPEATS, int(budget / once)))
    return timed(function, repeats, device) / repeats
