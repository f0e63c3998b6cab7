"""The style of a model whose rows ranks share, without a plan of its attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.context.backends import BACKENDS
from megatron_lightning.layers.shared_rows.entry import SharedRows
from megatron_lightning.layers.shared_rows.mixers import SharingRanks
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
    shares_sequences = True  # see GroupedHeads
    description: ClassVar[str] = "FoundMixers: ways are found at the start"
    """Text in a description of the layout."""

    def check_context(self, module: nn.Module, layout: ParallelLayout, plan: ShardingPlan) -> None:
        """Check that a rank holds full rows in the blocks.

        Raises:
            ShardingError: If the layout has sequence parallelism.
        """
        name = type(module).__name__
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
            ranks = SharingRanks(context.cp, attention)
            pp = context.pp if context.layout.num_stages > 1 else None
            hook = SharedRows(ranks, groups, context.context_options.mixers, pp)
            module.register_forward_pre_hook(hook, with_kwargs=True)
        return module
