"""Styles of modules that see a rank's part of the sequence (context parallelism)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.attention import CoreAttention
from megatron_lightning.layers.context.backends import BACKENDS
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.parallel.sharding import ShardingPlan


@dataclass(frozen=True)
class ContextAttention:
    """A :class:`CoreAttention` whose queries see the keys of all context-parallel ranks."""

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
        module.exchange = BACKENDS[context.cp_comm_type](context.cp)
        return module
