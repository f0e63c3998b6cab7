"""Styles of models and modules whose rows ranks share, and whose code stays."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import ClassVar

from torch import nn

from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.change_class import change_class
from megatron_lightning.layers.context.backends import BACKENDS
from megatron_lightning.layers.shared_rows.conditions import dropout_of
from megatron_lightning.layers.shared_rows.entry import SharedRows
from megatron_lightning.layers.shared_rows.mixers import SharingRanks
from megatron_lightning.layers.shared_rows.own_modules import (
    KEYS,
    MASK,
    GatheringModule,
    RowsModule,
    TokenSharer,
)
from megatron_lightning.layers.shared_rows.row_names import reads_source
from megatron_lightning.layers.styles.common import AdditionalStyle
from megatron_lightning.layers.styles.context import cp_comm_type_of
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.parallel.shards.sharding import ShardingPlan, Style


@dataclass(frozen=True)
class FoundMixers(AdditionalStyle):
    """A model of ``transformers`` whose blocks get a rank's part of the rows. What mixes tokens is
    found and proven in the first step (:mod:`megatron_lightning.layers.shared_rows`).
    """

    also: Style | None = None
    """Another style of the same module, applied first."""
    takes_media: bool = False
    """Whether rows may hold images or sounds."""
    shares_sequences = True  # see GroupedHeads
    description: ClassVar[str] = "FoundMixers: ways are found at the start"
    """Text in a description of the layout."""

    def check_context(self, module: nn.Module, layout: ParallelLayout, plan: ShardingPlan) -> None:
        """Check that a rank holds full rows in the blocks, and an encoder beside its decoder.

        Raises:
            ShardingError: If the layout has sequence parallelism, or stages divide an encoder and
                a decoder.
        """
        name = type(module).__name__
        if layout.num_stages > 1 and self.takes_media:
            raise ShardingError(
                f"{name} has a tower beside its text model, and ranks that share its rows compare "
                "the first rows with images with one process, for which each needs all layers. "
                f"There are {layout.num_stages} pipeline stages. Set pipeline_model_parallel_size "
                "or context_parallel_size to 1."
            )
        if layout.num_stages > 1 and reads_source(module):
            raise ShardingError(
                f"ranks share the rows of the decoder of {name}, and its encoder runs on full rows "
                f"beside it, which {layout.num_stages} pipeline stages would part. Set "
                "pipeline_model_parallel_size or context_parallel_size to 1."
            )
        if layout.sp and plan.shards_sequence:
            raise ShardingError(
                f"what mixes the tokens of {name} is found in full rows, and sequence_parallel "
                "divides them once more. Set sequence_parallel to False."
            )

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Prepare the model for its first call."""
        module = self.apply_also(module, context, plan)
        if context.cp.size > 1:
            self.check_context(module, context.layout, plan)
            groups = context.dp_cp, context.tp
            attention = BACKENDS[cp_comm_type_of(None, context)](context)
            ranks = SharingRanks(context.cp, attention, takes_media=self.takes_media)
            pp = context.pp if context.layout.num_stages > 1 else None
            # Experts meet the tokens of other replicas.
            replica = () if context.layout.divides_experts else (context.cp, context.tp)
            hook = SharedRows(ranks, groups, context.context_options.mixers, pp, replica)
            module.register_forward_pre_hook(hook, with_kwargs=True)
        return module


@dataclass(frozen=True)
class _SharedTokens(AdditionalStyle):
    """A module of any class that mixes the tokens of context-parallel ranks."""

    dim: int = 1
    """Dim of the tokens in arguments and outputs: 1 is batch-first."""
    also: Style | None = None
    """Another style of the same module, applied first."""
    shares_sequences = True  # see GroupedHeads
    makes: ClassVar[type[TokenSharer]] = TokenSharer

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Change the class of the module.

        Raises:
            ShardingError: If the module drops values.
        """
        module = self.apply_also(module, context, plan)
        if context.cp.size == 1:
            return module
        if rate := dropout_of(module):
            raise ShardingError(
                f"style {type(self).__name__} takes no dropout, and the plan points it at a "
                f"{type(module).__name__} with dropout of {rate}: ranks would drop different "
                "values. Set it to 0."
            )
        return change_class(
            module, self.makes, token_group=context.cp, token_dim=self.dim, deal=None
        )


@dataclass(frozen=True)
class GatheredTokens(_SharedTokens):
    """A module that computes full rows on every rank and returns a rank's part, whatever it
    does. Arguments with the tokens of the rank in dim ``dim`` are gathered.
    """

    makes = GatheringModule


@dataclass(frozen=True)
class DividedRows(_SharedTokens):
    """Causal attention of a rank's queries to the keys of all ranks. The module gets two keywords,
    as attention of ``transformers``: ``attention_mask`` [1, 1, queries, keys] of booleans, and
    ``past_key_values``, whose ``update(keys, values)`` [b, heads, tokens, size] returns those of
    all ranks.
    """

    makes = RowsModule

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Change the class of the module.

        Raises:
            ShardingError: If its forward lacks one of the keywords.
        """
        names = signature(module.forward).parameters
        for name in (MASK, KEYS):
            if name not in names:
                raise ShardingError(
                    f"style DividedRows passes {name} to a {type(module).__name__}, whose forward "
                    "does not take it. Add the keyword, or use GatheredTokens()."
                )
        return super().apply(module, context, plan)
