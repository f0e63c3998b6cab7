"""Styles of modules that see a sequence shard (context parallelism)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megatron_lightning.config import CPCommType
from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.attention.self_attention import CoreAttention
from megatron_lightning.layers.attention.transformers_attention import looks_attention_up, put_core
from megatron_lightning.layers.context.backends import BACKENDS
from megatron_lightning.layers.styles.common import AdditionalStyle
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.shards.sharding import ShardingPlan, Style


@dataclass(frozen=True)
class ContextGroup:
    """A module with an attribute ``context_group``: the ranks with shards of the same sequences."""

    splits = False

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Set the attribute.

        Raises:
            ShardingError: If the module has no such attribute.
        """
        if not hasattr(module, "context_group"):
            raise ShardingError(
                f"style ContextGroup sets context_group, and the plan points it at a "
                f"{type(module).__name__}, which has none. Correct the pattern."
            )
        module.context_group = context.cp  # type: ignore[assignment]
        return module


@dataclass(frozen=True)
class ContextAttention(AdditionalStyle):
    """A :class:`CoreAttention`, or attention of ``transformers``, with keys from all
    context-parallel ranks.
    """

    cp_comm_type: CPCommType | None = None
    """Context-parallel communication. None: the default of ``ContextOptions``."""
    also: Style | None = None
    """Another style of the same module, applied first."""
    shares_sequences = True  # see GroupedHeads

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Bind the attention to the ranks.

        Raises:
            ShardingError: If the module is of another class, or drops attention weights.
        """
        module = self.apply_also(module, context, plan)
        if context.cp.size == 1:
            return module
        if not isinstance(module, CoreAttention) and not looks_attention_up(module):
            raise ShardingError(
                f"style ContextAttention takes a CoreAttention, and the plan points it at a "
                f"{type(module).__name__}. Correct the pattern, or build the attention from "
                "megatron_lightning.layers.CoreAttention."
            )
        core = module if isinstance(module, CoreAttention) else put_core(module)
        if core.dropout.p:
            raise ShardingError(
                f"attention_dropout={core.dropout.p} cannot be combined with "
                f"context_parallel_size={context.cp.size}. Set it to 0."
            )
        core.cp_comm_type = cp_comm_type_of(self.cp_comm_type, context)
        core.cp_comm = BACKENDS[core.cp_comm_type](context)
        core.num_context_ranks = context.cp.size
        return module


def cp_comm_type_of(own: CPCommType | None, context: ParallelContext) -> CPCommType:
    """Return the context-parallel communication of one attention module.

    Args:
        own: The communication that the plan names. None: the default of ``ContextOptions``.
        context: The ranks.

    Raises:
        ShardingError: If the default is a list of several types, or an unknown type.
    """
    cp_comm_type = own or context.context_options.cp_comm_type
    if isinstance(cp_comm_type, list) or cp_comm_type not in BACKENDS:
        raise ShardingError(
            f"cp_comm_type is {cp_comm_type!r}, and one attention module has one of "
            f"{', '.join(BACKENDS)}. Write ContextAttention(cp_comm_type=...) with it."
        )
    return cp_comm_type
