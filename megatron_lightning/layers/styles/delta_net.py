"""Style of the mixer of gated delta net."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.state_space.delta_net import GatedDeltaNet
from megatron_lightning.layers.styles.common import expect
from megatron_lightning.layers.styles.parameters import Split, shard_parameters
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.parallel.shards.sharding import ShardingPlan


@dataclass(frozen=True)
class DeltaNetHeads:
    """A :class:`GatedDeltaNet` with the heads of a rank.

    Weights: A_log and dt_bias split by value heads. The mixer also gets the context-parallel ranks,
    with which it exchanges tokens for heads.
    """

    shares_sequences = True  # see GroupedHeads

    num_key_heads: int
    """Key heads of the model."""
    num_value_heads: int
    """Value heads of the model."""

    def check(self, module: nn.Module, layout: ParallelLayout, plan: ShardingPlan) -> None:
        """Check that tensor-parallel ranks can share the heads.

        Raises:
            ShardingError: If the ranks do not divide the key heads.
        """
        if self.num_key_heads % layout.tp:
            raise ShardingError(
                f"{self.num_key_heads} key heads of gated delta net cannot be split over "
                f"{layout.tp} tensor-parallel ranks. Set tensor_model_parallel_size to a divisor "
                f"of {self.num_key_heads}."
            )

    def check_context(self, module: nn.Module, layout: ParallelLayout, plan: ShardingPlan) -> None:
        """Check that context-parallel ranks can share the heads of a tensor-parallel rank.

        Raises:
            ShardingError: If the ranks cannot share the heads.
        """
        keys, values, cp = self.num_key_heads, self.num_value_heads, layout.cp
        keys, values = keys // layout.tp, values // layout.tp
        if values % cp or (keys % cp and cp % keys):
            raise ShardingError(
                f"{cp} context-parallel ranks exchange tokens for heads of gated delta net, and "
                f"cannot share the {keys} key heads and {values} value heads of a tensor-parallel "
                "rank: a rank takes equally many value heads, of full key heads or of one. Set "
                f"context_parallel_size to a divisor of {values} that divides {keys} or is a "
                f"multiple of {keys}."
            )

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Split the parameters in place, and bind the module to the ranks."""
        self.check(module, context.layout, plan)
        self.check_context(module, context.layout, plan)
        mixer = expect(module, GatedDeltaNet, "DeltaNetHeads")
        shard_parameters(mixer, dict.fromkeys(mixer.precise, Split()), context.tp)
        mixer.context_group = context.cp if context.cp.size > 1 else None
        return mixer
