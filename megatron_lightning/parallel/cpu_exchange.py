"""All-gather and reduce-scatter of CPU tensors as direct messages.

torch's gloo backend gathers through a flat copy and reduces-scatters by an all-reduce of everything. Here each rank sends every
other one what that rank needs, out of and into the tensors themselves: (n - 1) / n of the data, and no copies. They are
operators of their own, so that ``torch.compile`` traces them and activation checkpointing may save or recompute them. Small
messages go faster through gloo's collectives, whose fixed costs are lower.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_SMALLEST_BYTES = 2**20  # from here on they take 0.35 to 0.75 of gloo's processor time (docs/LOG.md)


def pays(x: Tensor) -> bool:
    """Return whether the operators here are the faster ones for ``x``, which has this size on every rank."""
    return x.device.type == "cpu" and x.nbytes >= _SMALLEST_BYTES


@torch.library.custom_op("megatron_lightning::all_gather", mutates_args=(), schema="(Tensor x, int size, str group) -> Tensor")
def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """Return the contiguous ``x`` of all ``size`` ranks of the group, one after the other along dim 0."""
    process_group = _group(group)
    own = dist.get_rank(process_group)
    gathered = x.new_empty((size * x.shape[0], *x.shape[1:]))
    parts = gathered.chunk(size)
    _exchange(process_group, {rank: (x, parts[rank]) for rank in range(size) if rank != own})
    parts[own].copy_(x)
    return gathered


@torch.library.custom_op(
    "megatron_lightning::reduce_scatter", mutates_args=(), schema="(Tensor x, int size, str group) -> Tensor"
)
def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """Return the sum of all ranks' contiguous ``x``, of which each of ``size`` ranks keeps its part along dim 0."""
    process_group = _group(group)
    own = dist.get_rank(process_group)
    parts = x.chunk(size)
    received = {rank: torch.empty_like(parts[own]) for rank in range(size) if rank != own}
    _exchange(process_group, {rank: (parts[rank], buffer) for rank, buffer in received.items()})
    total, *others = received.values()
    total += parts[own]
    for other in others:
        total += other
    return total


@all_gather.register_fake
def _(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty((size * x.shape[0], *x.shape[1:]))


@reduce_scatter.register_fake
def _(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty((x.shape[0] // size, *x.shape[1:]))


def _group(name: str) -> dist.ProcessGroup:
    distributed: Any = dist.distributed_c10d
    group: dist.ProcessGroup = distributed._resolve_process_group(name)
    return group


def _exchange(group: dist.ProcessGroup, messages: dict[int, tuple[Tensor, Tensor]]) -> None:
    """Send the first tensor to and receive the second from every rank of ``messages``, all at once."""
    works = [dist.irecv(buffer, group=group, group_src=rank) for rank, (_, buffer) in messages.items()]
    works += [dist.isend(tensor, group=group, group_dst=rank) for rank, (tensor, _) in messages.items()]
    for work in works:
        if work is not None:
            work.wait()
