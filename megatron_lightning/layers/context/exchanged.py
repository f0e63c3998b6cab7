"""Attention with exchanged heads (https://arxiv.org/abs/2309.14509): an all-to-all gives every rank
the whole sequence of some heads, and another one gives the outputs back.

Where ranks outnumber the key heads, each key head is repeated for the ranks whose queries use it.
"""

from __future__ import annotations

from torch import Tensor

from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.context.ring import RingAttention
from megatron_lightning.layers.sequence_info import SequenceInfo
from megatron_lightning.parallel.context import AxisGroup
from megatron_lightning.parallel.sequence_exchange import heads_to_sequence, sequence_to_heads


class ExchangedAttention:
    """Attention over whole sequences, for a rank's share of the heads.

    Args:
        group: The context-parallel ranks.
    """

    def __init__(self, group: AxisGroup) -> None:
        self.group = group
        self._local = RingAttention(AxisGroup(group.name, group.ranks[:1], 0, None))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sequence: SequenceInfo, scale: float
    ) -> Tensor:
        """Map this rank's queries [b, n, s, d], keys and values [b, g, s, d] to outputs [b, n, s,
        d].

        Raises:
            ShardingError: If the heads do not divide over the ranks.
        """
        copies = self._copies(k.shape[1])
        if copies > 1:
            k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
        full = [sequence_to_heads(x, self.group) for x in (q, k, v)]
        output = self._local(full[0], full[1], full[2], sequence, scale)
        return heads_to_sequence(output, self.group)

    def _copies(self, num_groups: int) -> int:
        """Return how many ranks share a key head."""
        size = self.group.size
        if num_groups % size and size % num_groups:
            raise ShardingError(
                f"{num_groups} key heads and {size} context-parallel ranks: neither divides the "
                'other. Change context_parallel_size, or set cp_comm_type to "p2p".'
            )
        return max(1, size // num_groups)
