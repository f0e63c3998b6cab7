"""The ways in which queries meet the keys of other ranks, by Megatron-Core's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from megatron_lightning.config import AttentionBackend
from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.context.exchanged import ExchangedAttention
from megatron_lightning.layers.context.gathered import GatheredAttention
from megatron_lightning.layers.context.ring import RingAttention
from megatron_lightning.layers.sequence_info import SequenceInfo
from megatron_lightning.parallel.context import AxisGroup, ParallelContext


class ContextBackend(Protocol):
    """Attention of ranks that share sequences."""

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
