"""Communication between queries and the keys of other ranks, by Megatron-Core's names.

*Gathered keys*: every rank keeps its queries and all-gathers the keys and values of the full
sequence in forward. Only the rank's shards are saved, so backward gathers again. Backward
reduce-scatters the gradients of all keys, summed in fp32 (https://arxiv.org/abs/2407.21783, section
3.3.2).

*Exchanged heads* (https://arxiv.org/abs/2309.14509): an all-to-all gives every rank more of the
sequence for fewer heads. A second all-to-all returns the outputs. One level: all c ranks exchange,
and each rank attends to full sequences. Two levels (https://arxiv.org/abs/2405.07719): groups of a
neighbors exchange, and c / a ranks, one from each group, pass keys and values around a ring. The
joined shards of a neighbors equal a shard of a split over c / a ranks (``c`` chunk of the sequence,
4 ranks):

    rank      0      1      2      3          a = 2: ranks 0, 1    ranks 2, 3
    split     c0 c7  c1 c6  c2 c5  c3 c4             c0 c1 c6 c7   c2 c3 c4 c5

*Ring*: see ``ring``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from math import lcm
from typing import Protocol

import torch
from torch import Tensor

from megatron_lightning.config import AttentionBackend
from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.attention.sequence_info import SequenceInfo
from megatron_lightning.layers.context.blocks import Block, visible_blocks
from megatron_lightning.layers.context.kernels import Inputs, Output
from megatron_lightning.layers.context.merged import Gradients, Merged, Sharing
from megatron_lightning.layers.context.ring import RingAttention
from megatron_lightning.layers.context.shared import GroupAttention, differentiable
from megatron_lightning.parallel.collectives import finish, reduce_scatter_start
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.sequence import SequencePart
from megatron_lightning.parallel.sequence_exchange import (
    gather_parts,
    heads_to_sequence,
    sequence_to_heads,
)


class GatheredAttention(GroupAttention):
    """Attention between the queries of a rank and gathered keys.

    Args:
        group: The context-parallel ranks.
    """

    def __init__(self, group: AxisGroup) -> None:
        super().__init__(group, _attend)


def _gather(inputs: Inputs, sharing: Sharing) -> Tensor:
    """Return all keys and values [2, b, g, s, d], in the order of the sequence."""
    return gather_parts(torch.stack(inputs[1:]), sharing.group, 3, sharing.sequence.deal)


def _scatter(gradients: Tensor, sharing: Sharing) -> Tensor:
    """Return the sum over the ranks of the gradients of this rank's keys and values."""
    group, deal = sharing.group, sharing.sequence.deal
    parts = [SequencePart(rank, group.size, deal).split(gradients, 3) for rank in range(group.size)]
    return finish(reduce_scatter_start(torch.stack(parts), group), group)[0]


def _blocks(length: int, sharing: Sharing) -> list[Block]:
    """Return the visible blocks of a sequence of ``length`` positions."""
    group = sharing.group
    queries = SequencePart(group.rank, group.size, sharing.sequence.deal).spans(length)
    edges = sorted({0, length, *(x.start for x in queries), *(x.stop for x in queries)})
    keys = [range(start, stop) for start, stop in pairwise(edges)]
    return visible_blocks(queries, keys, sharing.sequence)


class _Gathered:
    def __call__(self, inputs: Inputs, sharing: Sharing) -> Output:
        merged, gathered = Merged(inputs.q, sharing), _gather(inputs, sharing)
        merged.see(gathered, _blocks(gathered.shape[3], sharing))
        return Output(merged.out.to(inputs.q.dtype), merged.log_sum)

    def gradients(
        self, grad: Tensor, inputs: Inputs, output: Output, sharing: Sharing
    ) -> tuple[Tensor, Tensor]:
        gathered = _gather(inputs, sharing)
        gradients = Gradients(grad, inputs.q, output, sharing)
        sums = gradients.of(gathered, _blocks(gathered.shape[3], sharing))
        return gradients.q.to(inputs.q.dtype), _scatter(sums, sharing).to(inputs.k.dtype)


_attend = differentiable("gathered_attention", _Gathered())


class ExchangedAttention:
    """Attention of a rank's share of the heads, over full sequences or shards.

    Args:
        inner: Ranks that exchange sequence shards for heads: all context-parallel ranks, or
            neighbors.
        outer: Ranks with the other sequence shards of the same heads. None: there are none.
    """

    def __init__(self, inner: AxisGroup, outer: AxisGroup | None = None) -> None:
        self.group = inner
        self._ring = RingAttention(outer or AxisGroup(inner.name, inner.ranks[:1], 0, None))

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequence: SequenceInfo,
        scale: float,
        *,
        backend: AttentionBackend = "auto",
        softcap: float | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Map this rank's queries [b, n, s, d], keys and values [b, g, s, d] to outputs [b, n, s,
        d]. ``softcap`` and ``sink`` [n]: see :class:`Sharing`.

        Raises:
            ShardingError: If the query heads do not divide over the exchanging ranks.
        """
        if sequence.deal is not None and self._ring.group.size > 1:
            raise ShardingError(
                'cp_comm_type "a2a+p2p" passes keys between groups of neighbors, whose chunks must '
                "be adjacent, and the chunks of packed rows were dealt by work. Set "
                "ContextOptions(chunks_per_rank=2)."
            )
        # If the number of ranks does not divide the key heads, several ranks share a key head.
        copies = lcm(k.shape[1], self.group.size) // k.shape[1]
        if copies > 1:
            k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
        q, k, v = (sequence_to_heads(x, self.group, sequence.deal) for x in (q, k, v))
        if sink is not None:
            sink = sink.chunk(self.group.size)[self.group.rank]
        out = self._ring(q, k, v, sequence, scale, backend=backend, softcap=softcap, sink=sink)
        return heads_to_sequence(out, self.group, sequence.deal)


class ContextBackend(Protocol):
    """Attention of ranks with shared sequences."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequence: SequenceInfo,
        scale: float,
        *,
        backend: AttentionBackend = "auto",
        softcap: float | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Map this rank's queries [b, n, s, d], keys and values [b, g, s, d] to outputs [b, n, s,
        d]. ``softcap`` and ``sink`` [n]: see :class:`Sharing`.
        """
        ...


BACKENDS: Mapping[str, Callable[[ParallelContext], ContextBackend]] = {
    "p2p": lambda context: RingAttention(context.cp),
    "all_gather": lambda context: GatheredAttention(context.cp),
    "a2a": lambda context: ExchangedAttention(context.cp),
    "a2a+p2p": lambda context: ExchangedAttention(*_levels(context)),
}


def _levels(context: ParallelContext) -> tuple[AxisGroup, AxisGroup]:
    if context.cp_levels is None:
        raise ShardingError(
            'cp_comm_type "a2a+p2p" has two levels of ranks, and there are none. Set '
            "ContextOptions(hierarchical_context_parallel_sizes=...)."
        )
    return context.cp_levels
