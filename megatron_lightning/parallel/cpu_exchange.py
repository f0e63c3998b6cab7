"""All-gather and reduce-scatter of CPU tensors, complete when they return; operators that ``torch.compile`` traces and that
activation checkpointing may save or recompute.

torch's gloo backend gathers through a flat copy and reduces-scatters by an all-reduce of everything. Of large tensors each
rank therefore sends every other one what that rank needs, out of and into the tensors themselves: (n - 1) / n of the data, and
no copies. Small ones go faster through gloo's collectives, whose fixed costs are lower.

torch's functional all-gather is not among these. On gloo it is a collective named ``ALLGATHER_COALESCED``, and both threads of
a gloo group, without a lock, assign the name of what they last completed to one ``std::string`` (``ProcessGroupGloo::runLoop``
of torch 2.13). A name of more than 15 characters makes that string allocate memory, which one thread may free while
the other writes into it: trainings aborted in ``malloc`` (docs/LOG.md). The names of the collectives used here are shorter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning import compat

SMALLEST_DIRECT_BYTES = 2**20
"""From this size on direct messages take 0.35 to 0.75 of gloo's processor time (docs/LOG.md)."""


@torch.library.custom_op("megatron_lightning::all_gather", mutates_args=(), schema="(Tensor x, int size, str group) -> Tensor")
def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """Return the contiguous ``x`` of all ``size`` ranks of the group, one after the other along dim 0."""
    process_group = _group(group)
    gathered = x.new_empty((size * x.shape[0], *x.shape[1:]))
    if x.nbytes < SMALLEST_DIRECT_BYTES:
        compat.all_gather(gathered, x, process_group)
        return gathered
    own, parts = dist.get_rank(process_group), gathered.chunk(size)
    _exchange(process_group, {rank: (x, parts[rank]) for rank in range(size) if rank != own})
    parts[own].copy_(x)
    return gathered


@torch.library.custom_op(
    "megatron_lightning::reduce_scatter", mutates_args=(), schema="(Tensor x, int size, str group) -> Tensor"
)
def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """Return the sum of all ranks' contiguous ``x``, of which each of ``size`` ranks keeps its part along dim 0."""
    process_group = _group(group)
    if x.nbytes < SMALLEST_DIRECT_BYTES:
        total = x.new_empty((x.shape[0] // size, *x.shape[1:]))
        compat.reduce_scatter(total, x, process_group)
        return total
    own, parts = dist.get_rank(process_group), x.chunk(size)
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
