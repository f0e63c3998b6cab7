"""Self-test of the collectives: speed of every axis, and the slowest pair of neighbors."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout

_AXES = ("tp", "cp", "dp", "pp", "ep")
_NUM_BYTES: Mapping[str, int] = {"cuda": 1 << 26, "cpu": 1 << 22}
_MOST_REPEATS = 200
_PAIR_REPEATS = 3
_SLOW = 0.5  # of the median pair


def measure_links(
    device: torch.device, sizes: dict[str, Any], seconds: float
) -> list[dict[str, Any]]:
    """Return a row for each axis, on rank 0: size of a group, GB/s of the slowest group's
    all-reduce, and the slowest pair of neighbors. A collective of all ranks.

    Args:
        device: Device of this rank.
        sizes: Arguments of :class:`ParallelLayout`.
        seconds: Time for all axes together.
    """
    if not dist.is_initialized():
        return []
    context = ParallelContext(ParallelLayout(**sizes), device=device)
    names = [name for name in _AXES if context.axis(name).size > 1] or ["world"]
    budget = seconds / len(names)
    return [_measure_axis(context, context.axis(name), budget) for name in names]


def _measure_axis(context: ParallelContext, group: AxisGroup, budget: float) -> dict[str, Any]:
    device = context.device
    message = torch.ones(_NUM_BYTES[device.type] // 4, device=device)

    def reduce() -> None:
        dist.all_reduce(message, group=group.process_group)

    reduce()
    is_right = bool((message == group.size).all().item())
    message.zero_()
    once = max(context.axis("world").all_gather_object(timed(reduce, 1, device)))
    repeats = max(1, min(_MOST_REPEATS, int(budget / 2 / max(once, 1e-6))))
    spent = timed(reduce, repeats, device) / repeats
    moved = 2 * (group.size - 1) / group.size * message.nbytes
    row: dict[str, Any] = {
        "rank": context.rank,
        "host": socket.gethostname(),
        "speed": moved / spent / 1e9,
        "is_right": is_right,
        "pairs": _pairs(group, message),
    }
    ranks = context.axis("world").all_gather_object(row)
    hosts = {one["rank"]: one["host"] for one in ranks}
    pairs = [pair for one in ranks for pair in one["pairs"]]
    (speed, first, second), (median, _, _) = min(pairs), sorted(pairs)[len(pairs) // 2]
    return {
        "axis": group.name,
        "size": group.size,
        "all_reduce": min(one["speed"] for one in ranks),
        "is_right": all(one["is_right"] for one in ranks),
        "slowest_pair": speed,
        "median_pair": median,
        "is_slow": speed < _SLOW * median,
        "ranks": [first, second],
        "hosts": [hosts[first], hosts[second]],
    }


def _pairs(group: AxisGroup, message: Tensor) -> list[tuple[float, int, int]]:
    """Exchange a message with both neighbors. Return GB/s in each direction, and the ranks."""
    buffer = torch.empty_like(message)
    speeds: list[tuple[float, int, int]] = []
    for parity in (0, 1):
        ahead = (group.rank + parity) % 2 == 0
        partner = group.rank + (1 if ahead else -1)
        if not 0 <= partner < group.size:
            continue
        peer = group.ranks[partner]
        operations = [
            dist.P2POp(dist.isend, message, peer, group.process_group),
            dist.P2POp(dist.irecv, buffer, peer, group.process_group),
        ]

        def exchange(operations: list[dist.P2POp] = operations) -> None:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        exchange()
        spent = timed(exchange, _PAIR_REPEATS, message.device) / _PAIR_REPEATS
        if ahead:
            speeds.append((message.nbytes / spent / 1e9, group.ranks[group.rank], peer))
    return speeds


def timed(function: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the seconds of all calls."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    _wait(device)
    return max(time.perf_counter() - start, 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
