"""Styles of linear layers, embeddings, norms and losses under tensor and sequence parallelism.

Over one rank a module of any class stays as it is; only its specs record the axis.

A model whose modules each handle their own input and output (``GPTModel``) names a style for every
linear layer. One whose attention reads the shape of its input (Hugging Face) enters the parallel
region once, before the attention (:class:`ParallelInput`), and its column-parallel layers leave the
input alone (``copy_input=False``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.dropout import Dropout
from megatron_lightning.layers.embedding import (
    SequenceParallelEmbedding,
    VocabParallelEmbedding,
    shard_vocabulary,
)
from megatron_lightning.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    SharedGroupsLinear,
    VocabParallelLinear,
)
from megatron_lightning.layers.loss import CrossEntropy, VocabParallelCrossEntropy
from megatron_lightning.layers.norm import HeadsRMSNorm
from megatron_lightning.parallel.collectives import gather
from megatron_lightning.parallel.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.sharding import ShardingPlan
from megatron_lightning.parallel.spec import ShardSpec

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def _keep(module: nn.Module, group: AxisGroup, *split: str) -> nn.Module:
    """Return ``module`` for a group of one rank; its parameters ``split`` are recorded as
    sharded.
    """
    own = module.named_parameters(recurse=False)
    specs = {
        n: ShardSpec.split(p.shape, dim=0, size=1, rank=0, axis=group.name)
        for n, p in own
        if n in split
    }
    module.shard_specs = specs  # type: ignore[assignment]
    return module


def _expect(module: nn.Module, kind: type[ModuleT], style: str) -> ModuleT:
    if not isinstance(module, kind):
        raise ShardingError(
            f"style {style} takes a {kind.__name__}, and the plan points it at a "
            f"{type(module).__name__}. Correct the pattern, or give this module another style."
        )
    return module


def _options(
    context: ParallelContext, plan: ShardingPlan, *, shards: bool = True
) -> dict[str, Any]:
    """Return the constructor keywords of all parallel layers; ``shards``: they gather or return
    sequence shards.
    """
    return {
        "group": context.tp,
        "sequence_parallel": plan.is_sequence_parallel(context) and shards,
        "sequence_dim": plan.sequence_dim,
    }


@dataclass(frozen=True)
class ColumnParallel:
    """``nn.Linear`` -> :class:`ColumnParallelLinear`."""

    num_blocks: int = 1
    """Equal blocks stacked in the output that are each split (2 for a fused gate and up
    projection)."""
    num_heads: int | None = None
    """Heads, or query groups, of the output, none of which may be split."""
    copy_input: bool = True
    """False inside a :class:`ParallelInput` region."""
    gather_output: bool = False
    """Return the full output on every rank."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Return the column-parallel layer."""
        if context.tp.size == 1:
            return _keep(module, context.tp, "weight", "bias")
        if self.num_heads is not None and self.num_heads % context.tp.size:
            raise ShardingError(
                f"{self.num_heads} heads (or query groups) cannot be split over {context.tp.size} "
                "tensor-parallel ranks. Set tensor_model_parallel_size to a divisor of "
                f"{self.num_heads}."
            )
        return ColumnParallelLinear.from_linear(
            _expect(module, nn.Linear, "ColumnParallel"),
            gather_output=self.gather_output,
            copy_input=self.copy_input,
            num_blocks=self.num_blocks,
            **_options(context, plan, shards=self.copy_input),
        )


@dataclass(frozen=True)
class QueryKeyValue:
    """A fused projection to queries, keys and values, grouped per query group -> a column-parallel
    one.

    Ranks that outnumber the query groups share them: see :class:`SharedGroupsLinear`. The attention
    around it then has fewer query heads per group, which the plan's ``attributes`` rewrite
    (:func:`local_heads_per_group`).
    """

    num_query_groups: int
    """Key and value heads of the full model."""
    heads_per_group: int
    """Query heads that share one of them."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Return the column-parallel layer."""
        groups, size = self.num_query_groups, context.tp.size
        if not _shares_groups(groups, size) or self.heads_per_group % (size // groups):
            return ColumnParallel(num_heads=groups).apply(module, context, plan)
        return SharedGroupsLinear.from_linear(
            _expect(module, nn.Linear, "QueryKeyValue"),
            num_groups=groups,
            heads_per_group=self.heads_per_group,
            shared_per_group=2,
            **_options(context, plan),
        )


@dataclass(frozen=True)
class KeyOrValue:
    """A separate projection to keys or to values -> a column-parallel one; that to queries is a
    :class:`ColumnParallel`.

    Ranks that outnumber the heads share them, as for :class:`QueryKeyValue`.
    """

    num_query_groups: int
    """Key (or value) heads of the full model."""
    copy_input: bool = True
    """False inside a :class:`ParallelInput` region."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Return the column-parallel layer."""
        groups = self.num_query_groups
        if not _shares_groups(groups, context.tp.size):
            return ColumnParallel(num_heads=groups, copy_input=self.copy_input).apply(
                module, context, plan
            )
        return SharedGroupsLinear.from_linear(
            _expect(module, nn.Linear, "KeyOrValue"),
            copy_input=self.copy_input,
            num_groups=groups,
            heads_per_group=0,
            shared_per_group=1,
            **_options(context, plan, shards=self.copy_input),
        )


def _shares_groups(num_query_groups: int, num_ranks: int) -> bool:
    return num_ranks > num_query_groups and num_ranks % num_query_groups == 0


def local_heads_per_group(
    num_query_groups: int, heads_per_group: int, context: ParallelContext
) -> int:
    """Return the query heads per group on a rank, given those of the full model."""
    return heads_per_group // max(1, context.tp.size // num_query_groups)


@dataclass(frozen=True)
class RowParallel:
    """``nn.Linear`` -> :class:`RowParallelLinear`."""

    split_input: bool = False
    """The input is replicated, and each rank takes its features of it."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Return the row-parallel layer."""
        if context.tp.size == 1:
            return _keep(module, context.tp, "weight")
        return RowParallelLinear.from_linear(
            _expect(module, nn.Linear, "RowParallel"),
            input_is_parallel=not self.split_input,
            **_options(context, plan),
        )


@dataclass(frozen=True)
class VocabParallel:
    """``nn.Embedding`` -> :class:`VocabParallelEmbedding`, or an output ``nn.Linear`` ->
    :class:`VocabParallelLinear`.
    """

    shard_sequence: bool = True
    """Under sequence parallelism the embedding returns a sequence shard; False: the model scatters
    it later."""
    gather_output: bool = False
    """The output layer returns the logits of the full vocabulary on every rank."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Return the vocabulary-parallel module."""
        if context.tp.size == 1:
            return _keep(module, context.tp, "weight", "bias")
        if isinstance(module, nn.Embedding):
            options = _options(context, plan, shards=self.shard_sequence)
            if type(module).forward is not nn.Embedding.forward:
                return shard_vocabulary(module, **options)
            return VocabParallelEmbedding.from_embedding(module, **options)
        linear = _expect(module, nn.Linear, "VocabParallel")
        return VocabParallelLinear.from_linear(
            linear, gather_output=self.gather_output, **_options(context, plan)
        )


@dataclass(frozen=True)
class SequenceParallel:
    """A module that maps each token alone (a norm): on sequence shards its parameters' gradients
    are partial sums.
    """

    shards_sequence = True

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Declare the gradients partial; learned positions are looked up for the rank's sequence
        shard only.
        """
        if not plan.is_sequence_parallel(context):
            return module
        if isinstance(module, nn.Embedding):
            return SequenceParallelEmbedding(
                module, group=context.tp, sequence_dim=plan.sequence_dim
            )
        return _partial_over(module, context.tp)


@dataclass(frozen=True)
class HeadParallel:
    """A module that maps each head alone (a query or key norm): on a rank's heads its gradients are
    partial sums.
    """

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Declare the gradients partial."""
        return _partial_over(module, context.tp)


@dataclass(frozen=True)
class HeadsNorm:
    """An ``nn.RMSNorm`` over all heads of queries or keys -> :class:`HeadsRMSNorm`.

    Weight: full; its gradient is a partial sum, of this rank's heads.
    """

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Return the norm whose mean is over the heads of all ranks."""
        if context.tp.size == 1:
            return module
        norm = HeadsRMSNorm(_expect(module, nn.RMSNorm, "HeadsNorm"), context.tp)
        return _partial_over(norm, context.tp)


def _partial_over(module: nn.Module, group: AxisGroup) -> nn.Module:
    own = module.named_parameters(recurse=False)
    module.shard_specs = {
        n: ShardSpec.replicated(p.shape, partial_over=(group.name,)) for n, p in own
    }  # type: ignore[assignment]
    return module


@dataclass(frozen=True)
class StreamDropout:
    """A ``Dropout`` whose input differs between the ranks, and which draws from a stream of the
    rank.
    """

    always: bool = False
    """The input is sharded with and without sequence parallelism (attention probabilities)."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Set the streams."""
        sharded = plan.is_sequence_parallel(context) or (self.always and context.tp.size > 1)
        if sharded or context.cp.size > 1:
            dropout = _expect(module, Dropout, "StreamDropout")
            dropout.streams = context.rng
            dropout.stream_name = "model-parallel-rng" if sharded else "data-parallel-rng"
        return module


class _GatherLogits(nn.Module):
    def __init__(self, group: AxisGroup, vocab_size: int) -> None:
        super().__init__()
        self.group = group
        self.vocab_size = vocab_size

    def forward(self, logits: Tensor) -> Tensor:
        return gather(logits, self.group, -1, self.vocab_size)


@dataclass(frozen=True)
class GatherLogits:
    """The identity -> an all-gather of the logits' shards, and a scatter of the gradient."""

    vocab_size: int
    """Size of the full vocabulary."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Return the gathering module."""
        return module if context.tp.size == 1 else _GatherLogits(context.tp, self.vocab_size)


@dataclass(frozen=True)
class VocabParallelLoss:
    """:class:`CrossEntropy` -> :class:`VocabParallelCrossEntropy`, which takes the logits'
    shards.
    """

    vocab_size: int
    """Size of the full vocabulary."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Return the vocabulary-parallel loss."""
        if context.tp.size == 1:
            return module
        plain = _expect(module, CrossEntropy, "VocabParallelLoss")
        return VocabParallelCrossEntropy(
            context.tp,
            self.vocab_size,
            plain.ignore_index,
            label_smoothing=plain.label_smoothing,
            z_loss=plain.z_loss,
        )
