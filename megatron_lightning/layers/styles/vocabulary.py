"""Styles of modules with a vocabulary dim: embeddings, output layers, logits and losses."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from megatron_lightning.layers.change_class import change_class
from megatron_lightning.layers.linear.embedding import VocabParallelEmbedding, shard_vocabulary
from megatron_lightning.layers.linear.parallel_linear import VocabParallelLinear
from megatron_lightning.layers.linear.replaceable import (
    check_hooks,
    check_parameter_hooks,
    check_replaceable,
    has_computed_weight,
    has_own_forward,
)
from megatron_lightning.layers.losses.loss import CrossEntropy, VocabParallelCrossEntropy
from megatron_lightning.layers.styles.common import (
    EMBEDDING,
    expect,
    is_sharded,
    keep,
    layer_options,
)
from megatron_lightning.parallel.collectives import gather
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.parallel.shards.sharding import ShardingPlan


@dataclass(frozen=True)
class VocabParallel:
    """``nn.Embedding`` -> :class:`VocabParallelEmbedding`, or an output ``nn.Linear`` ->
    :class:`VocabParallelLinear`.
    """

    shard_sequence: bool = True
    """Under sequence parallelism the embedding returns, and the output layer takes, a sequence
    shard.

    False: the model scatters the embedding's output later, and gathers the output layer's input
    before.
    """
    gather_output: bool = False
    """The output layer returns the logits of the full vocabulary on every rank."""

    def check(self, module: nn.Module, layout: ParallelLayout, plan: ShardingPlan) -> None:
        """Check that the module can be sharded.

        An embedding's custom forward is called with the rank's ids.

        Raises:
            ShardingError: If the module cannot be sharded.
        """
        sharded = is_sharded(layout, plan) and self.shard_sequence
        if not isinstance(module, nn.Embedding):
            VocabParallelLinear.check(
                module, gather_output=self.gather_output, sequence_parallel=sharded
            )
            return
        if has_computed_weight(module) or "forward" in vars(module):
            check_replaceable(module, EMBEDDING, "VocabParallel")
        # The output of a custom forward for other ranks' ids is dropped afterwards.
        own_forward = has_own_forward(module, EMBEDDING)
        shards = ["input"] if own_forward else []
        shards += ["output"] if own_forward or sharded else []
        check_hooks(module, "VocabParallel", shards)
        check_parameter_hooks(module, "weight")

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Return the vocabulary-parallel module."""
        if context.tp.size == 1:
            return keep(module, context.tp, "weight", "bias")
        self.check(module, context.layout, plan)
        options = layer_options(context, plan, shards=self.shard_sequence)
        if isinstance(module, nn.Embedding):
            if has_own_forward(module, EMBEDDING):
                return shard_vocabulary(module, **options)
            return VocabParallelEmbedding.from_embedding(module, **options)
        linear = expect(module, nn.Linear, "VocabParallel")
        return VocabParallelLinear.from_linear(linear, gather_output=self.gather_output, **options)


class LogitsGather(nn.Identity):
    """All-gather of the logits' shards."""

    group: AxisGroup
    vocab_size: int
    enabled: bool = True
    """False: logits stay shards."""

    def forward(self, logits: Tensor) -> Tensor:
        """Map [..., v / ranks] to [..., v]."""
        if not self.enabled:
            return logits
        return gather(logits, self.group, -1, self.vocab_size)


@dataclass(frozen=True)
class GatherLogits:
    """The identity -> an all-gather of the logits' shards, and a scatter of the gradient."""

    splits = False

    vocab_size: int
    """Size of the full vocabulary."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Return the gathering module."""
        if context.tp.size == 1:
            return module
        expect(module, nn.Identity, "GatherLogits")
        check_hooks(module, "GatherLogits", ("input",))
        return change_class(module, LogitsGather, group=context.tp, vocab_size=self.vocab_size)


@dataclass(frozen=True)
class VocabParallelLoss:
    """:class:`CrossEntropy` -> :class:`VocabParallelCrossEntropy`, for sharded logits."""

    splits = False

    vocab_size: int
    """Size of the full vocabulary."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Return the vocabulary-parallel loss."""
        if context.tp.size == 1:
            return module
        loss = expect(module, CrossEntropy, "VocabParallelLoss")
        check_hooks(loss, "VocabParallelLoss", ("input",))
        return VocabParallelCrossEntropy.from_loss(loss, context.tp, self.vocab_size)
