"""Styles of modules that see a rank's part of the sequence (context parallelism)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megatron_lightning.config import ContextExchange
from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.attention import CoreAttention
from megatron_lightning.layers.context.backends import BACKENDS
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.parallel.sharding import ShardingPlan


@dataclass(frozen=True)
class ContextAttention:
    """A :class:`CoreAttention` whose queries see the keys of all context-parallel ranks."""

    cp_comm_type: ContextExchange | None = None
    """How they meet these keys; None: as ``ContextOptions`` says for all."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Bind the attention to the ranks.

        Raises:
            ShardingError: If the module is of another class, or drops attention weights.
        """
        if context.cp.size == 1:
            return module
        if not isinstance(module, CoreAttention):
            raise ShardingError(
                f"style ContextAttention takes a CoreAttention, and the plan points it at a "
                f"{type(module).__name__}. Correct the pattern, or build the attention from "
                "megatron_lightning.layers.CoreAttention."
            )
        if module.dropout.p:
            raise ShardingError(
                f"attention_dropout={module.dropout.p} cannot be combined with "
                f"context_parallel_size={context.cp.size}. Set it to 0."
            )
        module.exchange = BACKENDS[self._exchange(context)](context)
        return module

    def _exchange(self, context: ParallelContext) -> ContextExchange:
        exchange = self.cp_comm_type or context.context_options.cp_comm_type
        if isinstance(exchange, list) or exchange not in BACKENDS:
            raise ShardingError(
                f"cp_comm_type is {exchange!r}, and one attention module has one of "
                f"{', '.join(BACKENDS)}. Write ContextAttention(cp_comm_type=...) with it."
            )
        return exchange
