"""Attention with exchanged heads (https://arxiv.org/abs/2309.14509): an all-to-all gives every rank
more of the sequence for some heads, and another one gives the outputs back.

One level: all c ranks exchange, and each attends to whole sequences. Two levels
(https://arxiv.org/abs/2405.07719): groups of a neighbors exchange, and c / a ranks, one of each
group, pass keys and values around a ring. The parts of a neighbors, joined, are a part of a split
over c / a ranks (``c`` chunk of the sequence, 4 ranks):

    rank      0      1      2      3          a = 2: ranks 0, 1    ranks 2, 3
    split     c0 c7  c1 c6  c2 c5  c3 c4             c0 c1 c6 c7   c2 c3 c4 c5
"""

from __future__ import annotations

from math import lcm

from torch import Tensor

from megatron_lightning.config import AttentionBackend
from megatron_lightning.layers.context.ring import RingAttention
from megatron_lightning.layers.sequence_info import SequenceInfo
from megatron_lightning.parallel.context import AxisGroup
from megatron_lightning.parallel.sequence_exchange import heads_to_sequence, sequence_to_heads


class ExchangedAttention:
    """Attention of a rank's share of the heads, over whole sequences or parts of them.

    Args:
        inner: Ranks that exchange parts of the sequence for heads: all context-parallel ones, or
            neighbors.
        outer: Ranks that hold the other parts for the same heads; None: there are none.
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
    ) -> Tensor:
        """Map this rank's queries [b, n, s, d], keys and values [b, g, s, d] to outputs [b, n, s,
        d].

        Raises:
            ShardingError: If the query heads do not divide over the ranks that exchange them.
        """
        # Where the ranks do not divide the key heads, some ranks share one.
        copies = lcm(k.shape[1], self.group.size) // k.shape[1]
        if copies > 1:
            k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
        q, k, v = (sequence_to_heads(x, self.group) for x in (q, k, v))
        return heads_to_sequence(self._ring(q, k, v, sequence, scale, backend=backend), self.group)
