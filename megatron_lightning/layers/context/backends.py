"""The ways in which queries meet the keys of other ranks, by Megatron-Core's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from megatron_lightning.layers.context.exchanged import ExchangedAttention
from megatron_lightning.layers.context.gathered import GatheredAttention
from megatron_lightning.layers.context.ring import RingAttention
from megatron_lightning.layers.sequence_info import SequenceInfo
from megatron_lightning.parallel.context import AxisGroup


class ContextBackend(Protocol):
    """Attention of ranks that share sequences."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sequence: SequenceInfo, scale: float
    ) -> Tensor:
        """Map this rank's queries [b, n, s, d], keys and values [b, g, s, d] to outputs [b, n, s,
        d].
        """
        ...


BACKENDS: Mapping[str, Callable[[AxisGroup], ContextBackend]] = {
    "p2p": RingAttention,
    "all_gather": GatheredAttention,
    "a2a": ExchangedAttention,
}
