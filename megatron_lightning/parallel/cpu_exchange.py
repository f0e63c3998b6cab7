"""All-gather and reduce-scatter of CPU tensors.

Collectives of activations are complete when they return: operators that ``torch.compile`` traces
and that activation checkpointing may save or recompute. Collectives of flat buffers (gradients,
parameters) work in place, on GPUs too, and asynchronously.

torch's gloo backend gathers through a flat copy and reduce-scatters by an all-reduce of everything.
With large tensors each rank therefore sends every other rank its chunk directly, without copies: a
fraction (n - 1) / n of the data. Small tensors are faster through gloo's collectives, because of
lower fixed costs.

torch's functional all-gather is not used. On gloo the all-gather is a collective named
``ALLGATHER_COALESCED``, and both threads of a gloo group, without a lock, assign the name of the
last completed collective to a shared ``std::string`` (``ProcessGroupGloo::runLoop`` of torch 2.13).
A name of more than 15 characters makes the string allocate memory, and a thread may free the memory
while the other thread writes: trainings aborted in ``malloc`` (docs/LOG.md). The names of the
collectives used here are shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning import compat

SMALLEST_DIRECT_BYTES = 2**20
"""From this size on direct messages take 0.35 to 0.75 of gloo's processor time (docs/LOG.md)."""


@torch.library.custom_op(
    "megatron_lightning::all_gather",
    mutates_args=(),
    schema="(Tensor x, int size, str group) -> Tensor",
)
def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """Return the contiguous ``x`` of all ``size`` ranks of the group, concatenated along dim 0."""
    process_group = _group(group)
    gathered = x.new_empty((size * x.shape[0], *x.shape[1:]))
    result = gathered
    if x.element_size() == 1:  # gloo does not know torch's 8-bit floats
        x, gathered = x.view(torch.uint8), gathered.view(torch.uint8)
    if not _is_direct(x):
        compat.all_gather(gathered, x, process_group)
        return result
    own_rank, chunks = dist.get_rank(process_group), gathered.chunk(size)
    messages = Messages(
        process_group, {rank: (x, chunks[rank]) for rank in range(size) if rank != own_rank}
    )
    chunks[own_rank].copy_(x)
    messages.wait()
    return result


@torch.library.custom_op(
    "megatron_lightning::reduce_scatter",
    mutates_args=(),
    schema="(Tensor x, int size, str group) -> Tensor",
)
def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """Return this rank's chunk, along dim 0, of the sum of the contiguous ``x`` of all ``size``
    ranks.
    """
    process_group = _group(group)
    if not _is_direct(x):
        total = x.new_empty((x.shape[0] // size, *x.shape[1:]))
        compat.reduce_scatter(total, x, process_group)
        return total
    own_rank, chunks = dist.get_rank(process_group), x.chunk(size)
    buffers = {rank: torch.empty_like(chunks[own_rank]) for rank in range(size) if rank != own_rank}
    Messages(
        process_group, {rank: (chunks[rank], buffer) for rank, buffer in buffers.items()}
    ).wait()
    total, *summands = buffers.values()
    total += chunks[own_rank]
    for summand in summands:
        total += summand
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


def gather_chunks(buffer: Tensor, group: dist.ProcessGroup) -> Messages | dist.Work | None:
    """Begin to gather the equal chunks of the 1-D ``buffer``, a chunk from each rank, in place."""
    chunks, own_rank = buffer.chunk(group.size()), group.rank()
    if not _is_direct(chunks[own_rank]):
        return compat.all_gather(buffer, chunks[own_rank], group, async_op=True)
    return Messages(
        group,
        {rank: (chunks[own_rank], chunk) for rank, chunk in enumerate(chunks) if rank != own_rank},
    )


def reduce_chunks(buffer: Tensor, group: dist.ProcessGroup) -> Messages | dist.Work | None:
    """Begin to sum the 1-D ``buffer`` over the group into this rank's chunk. The other chunks are
    undefined afterwards.
    """
    chunks, own_rank = buffer.chunk(group.size()), group.rank()
    if not _is_direct(buffer):
        return compat.reduce_scatter(chunks[own_rank], buffer, group, async_op=True)
    messages = {
        rank: (chunk, torch.empty_like(chunk))
        for rank, chunk in enumerate(chunks)
        if rank != own_rank
    }

    def add() -> None:
        for _, chunk in messages.values():
            chunks[own_rank].add_(chunk)

    return Messages(group, messages, add)


class Messages:
    """Asynchronous messages between this rank and other ranks.

    Args:
        group: Their communicator.
        messages: Rank of the group -> (tensor to send, tensor to receive into).
        then: Called when all messages have arrived.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        messages: Mapping[int, tuple[Tensor, Tensor]],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        works = [
            dist.irecv(buffer, group=group, group_src=rank)
            for rank, (_, buffer) in messages.items()
        ]
        works += [
            dist.isend(tensor, group=group, group_dst=rank)
            for rank, (tensor, _) in messages.items()
        ]
        self._works = [work for work in works if work is not None]
        self._then = then

    def wait(self) -> None:
        """Wait until everything was sent and has arrived."""
        for work in self._works:
            work.wait()
        self._then()


def _is_direct(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.nbytes >= SMALLEST_DIRECT_BYTES
