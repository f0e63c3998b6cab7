"""Styles of linear layers, norms and dropout under tensor and sequence parallelism.

With one rank a module of any class stays unchanged, and only the specs record the axis.

A model with self-contained modules (``GPTModel``) names a style for every linear layer. A model
whose attention reads the shape of its input (Hugging Face) enters the parallel region once, before
the attention (:class:`ParallelInput`). Column-parallel layers then leave the input unchanged
(``copy_input=False``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.adapters.adapter_layers import ALL_ROWS, adapters_of
from megatron_lightning.layers.dropout import Dropout
from megatron_lightning.layers.linear.embedding import SequenceParallelEmbedding
from megatron_lightning.layers.linear.parallel_linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    SharedGroupsLinear,
)
from megatron_lightning.layers.linear.replaceable import check_hooks, check_replaceable
from megatron_lightning.layers.norm import HeadsRMSNorm, MixedRMSNorm, RMSNorm
from megatron_lightning.layers.styles.adapters import (
    divide_column,
    divide_row,
    divide_tokens,
    draw_from_stream,
    partial_over,
)
from megatron_lightning.layers.styles.common import (
    EMBEDDING,
    expect,
    is_sharded,
    keep,
    layer_options,
)
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.parallel.shards.sharding import ShardingPlan, Style


@dataclass(frozen=True)
class ColumnParallel:
    """``nn.Linear`` -> :class:`ColumnParallelLinear`."""

    num_blocks: int = 1
    """Equal stacked blocks in the output, each split (2 for a fused gate and up projection)."""
    parts: tuple[int, ...] = ()
    """Features of unequal stacked parts of the output, each split. (): equal blocks."""
    num_heads: int | None = None
    """Heads, or query groups, of the output. No head may be split."""
    copy_input: bool = True
    """False inside a :class:`ParallelInput` region."""
    gather_output: bool = False
    """Return the full output on every rank."""

    def check(self, module: nn.Module, layout: ParallelLayout, plan: ShardingPlan) -> None:
        """Check that the layer can be sharded.

        Raises:
            ShardingError: If the layer cannot be sharded.
        """
        ColumnParallelLinear.check(
            module,
            copy_input=self.copy_input,
            gather_output=self.gather_output,
            sequence_parallel=is_sharded(layout, plan) and self.copy_input,
        )
        if self.num_heads is not None and self.num_heads % layout.tp:
            raise ShardingError(
                f"{self.num_heads} heads (or query groups) cannot be split over {layout.tp} "
                "tensor-parallel ranks. Set tensor_model_parallel_size to a divisor of "
                f"{self.num_heads}."
            )

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Return the column-parallel layer."""
        if context.tp.size == 1:
            return keep(module, context.tp, "weight", "bias")
        self.check(module, context.layout, plan)
        return ColumnParallelLinear.from_linear(
            expect(module, nn.Linear, "ColumnParallel"),
            gather_output=self.gather_output,
            copy_input=self.copy_input,
            num_blocks=self.num_blocks,
            parts=self.parts,
            **layer_options(context, plan, shards=self.copy_input),
        )

    def divide_adapters(
        self, module: nn.Module, context: ParallelContext, plan: ShardingPlan
    ) -> None:
        """Divide the adapters of the layer."""

        def style_of(part: str) -> Style:
            return self if part == ALL_ROWS else replace(self, num_blocks=1, parts=())

        divide_column(module, style_of, context, plan, copies_input=self.copy_input)


@dataclass(frozen=True)
class QueryKeyValue:
    """A fused projection to queries, keys and values, ordered by query group -> a column-parallel
    layer.

    If ranks outnumber the query groups, ranks share groups: see :class:`SharedGroupsLinear`. The
    surrounding attention then has fewer query heads per group, and the plan's ``attributes``
    rewrite the number (:func:`local_heads_per_group`).
    """

    num_query_groups: int
    """Key and value heads of the full model."""
    heads_per_group: int
    """Query heads that share a key and value head."""
    gates: bool = False
    """Whether the projection has a gate for each query head, behind the group's query heads."""

    def check(self, module: nn.Module, layout: ParallelLayout, plan: ShardingPlan) -> None:
        """Check that the layer can be sharded.

        Raises:
            ShardingError: If the layer cannot be sharded.
        """
        self._column(layout).check(module, layout, plan)

    def _column(self, layout: ParallelLayout) -> ColumnParallel:
        """Return the style of the layer, unless ranks share groups."""
        groups, size = self.num_query_groups, layout.tp
        shares = _shares_groups(groups, size) and self.heads_per_group % (size // groups) == 0
        return ColumnParallel(num_heads=None if shares else groups)

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Return the column-parallel layer."""
        groups, column = self.num_query_groups, self._column(context.layout)
        if column.num_heads is not None:
            return column.apply(module, context, plan)
        column.check(module, context.layout, plan)
        return SharedGroupsLinear.from_linear(
            expect(module, nn.Linear, "QueryKeyValue"),
            num_groups=groups,
            heads_per_group=self.heads_per_group,
            shared_per_group=2,
            gates=self.gates,
            **layer_options(context, plan),
        )

    def divide_adapters(
        self, module: nn.Module, context: ParallelContext, plan: ShardingPlan
    ) -> None:
        """Divide the adapters of the layer: a single adapter, or an adapter each for queries,
        gates, keys and values.
        """
        shared_style, column = KeyOrValue(self.num_query_groups), self._column(context.layout)
        parts: dict[str, Style] = {ALL_ROWS: self, "k": shared_style, "v": shared_style}
        parts |= dict.fromkeys(("q", "gate"), column)
        divide_column(module, parts.__getitem__, context, plan, copies_input=True)
        adapters = adapters_of(module)
        if adapters is not None and adapters.num_groups:
            adapters.num_groups = max(1, self.num_query_groups // context.tp.size)


@dataclass(frozen=True)
class KeyOrValue:
    """A separate projection to keys or to values -> a column-parallel layer.

    The projection to queries is a :class:`ColumnParallel`.

    If ranks outnumber the heads, ranks share heads, as for :class:`QueryKeyValue`.
    """

    num_query_groups: int
    """Key (or value) heads of the full model."""
    copy_input: bool = True
    """False inside a :class:`ParallelInput` region."""

    def check(self, module: nn.Module, layout: ParallelLayout, plan: ShardingPlan) -> None:
        """Check that the layer can be sharded.

        Raises:
            ShardingError: If the layer cannot be sharded.
        """
        self._column(layout).check(module, layout, plan)

    def _column(self, layout: ParallelLayout) -> ColumnParallel:
        """Return the style of the layer, unless ranks share heads."""
        groups = self.num_query_groups
        heads = None if _shares_groups(groups, layout.tp) else groups
        return ColumnParallel(num_heads=heads, copy_input=self.copy_input)

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Return the column-parallel layer."""
        groups, column = self.num_query_groups, self._column(context.layout)
        if column.num_heads is not None:
            return column.apply(module, context, plan)
        column.check(module, context.layout, plan)
        return SharedGroupsLinear.from_linear(
            expect(module, nn.Linear, "KeyOrValue"),
            copy_input=self.copy_input,
            num_groups=groups,
            heads_per_group=0,
            shared_per_group=1,
            **layer_options(context, plan, shards=self.copy_input),
        )

    def divide_adapters(
        self, module: nn.Module, context: ParallelContext, plan: ShardingPlan
    ) -> None:
        """Divide the adapters of the layer."""
        divide_column(module, lambda _: self, context, plan, copies_input=self.copy_input)


def _shares_groups(num_query_groups: int, num_ranks: int) -> bool:
    return num_ranks > num_query_groups and num_ranks % num_query_groups == 0


def local_heads_per_group(
    num_query_groups: int, heads_per_group: int, context: ParallelContext
) -> int:
    """Return the query heads per group on a rank, from the full model's number."""
    return heads_per_group // max(1, context.tp.size // num_query_groups)


@dataclass(frozen=True)
class RowParallel:
    """``nn.Linear`` -> :class:`RowParallelLinear`."""

    split_input: bool = False
    """The input is replicated, and each rank takes its features."""

    def check(self, module: nn.Module, layout: ParallelLayout, plan: ShardingPlan) -> None:
        """Check that the layer can be sharded.

        Raises:
            ShardingError: If the layer cannot be sharded.
        """
        RowParallelLinear.check(
            module,
            input_is_parallel=not self.split_input,
            sequence_parallel=is_sharded(layout, plan),
        )

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Return the row-parallel layer."""
        if context.tp.size == 1:
            return keep(module, context.tp, "weight")
        self.check(module, context.layout, plan)
        return RowParallelLinear.from_linear(
            expect(module, nn.Linear, "RowParallel"),
            input_is_parallel=not self.split_input,
            **layer_options(context, plan),
        )

    def divide_adapters(
        self, module: nn.Module, context: ParallelContext, plan: ShardingPlan
    ) -> None:
        """Divide the adapters of the layer."""
        divide_row(module, self, context, plan, splits_input=self.split_input)


@dataclass(frozen=True)
class SequenceParallel:
    """A module that maps each token separately (a norm).

    On sequence shards the gradients of its parameters are partial sums.
    """

    splits = False

    shards_sequence = True

    def check(self, module: nn.Module, layout: ParallelLayout, plan: ShardingPlan) -> None:
        """Check that an embedding can be looked up for a shard of the sequence.

        Raises:
            ShardingError: If the look-up is not possible.
        """
        if layout.sp and isinstance(module, nn.Embedding):
            check_replaceable(module, EMBEDDING, "SequenceParallel")
            check_hooks(module, "SequenceParallel", ("output",))

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Declare the gradients partial.

        Learned positions are looked up only for the rank's sequence shard.
        """
        if not plan.is_sequence_parallel(context):
            return module
        self.check(module, context.layout, plan)
        if isinstance(module, nn.Embedding):
            return SequenceParallelEmbedding.from_embedding(
                module, group=context.tp, sequence_dim=plan.sequence_dim
            )
        return partial_over(module, context.tp)

    def divide_adapters(
        self, module: nn.Module, context: ParallelContext, plan: ShardingPlan
    ) -> None:
        """Declare the gradients of the adapters partial."""
        divide_tokens(module, context, plan)


@dataclass(frozen=True)
class HeadParallel:
    """A module that maps each head separately (a query or key norm).

    On a rank's heads its gradients are partial sums.
    """

    splits = False

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Declare the gradients partial."""
        return partial_over(module, context.tp)


@dataclass(frozen=True)
class HeadsNorm:
    """An ``nn.RMSNorm`` over all heads of queries or keys -> :class:`HeadsRMSNorm`.

    Weight: full. The gradient is a partial sum over this rank's heads.
    """

    splits = False

    def check(self, module: nn.Module, layout: ParallelLayout, plan: ShardingPlan) -> None:
        """Check that the norm can be replaced.

        Raises:
            ShardingError: If the norm cannot be replaced.
        """
        check_replaceable(module, (nn.RMSNorm, RMSNorm, MixedRMSNorm), "HeadsNorm")
        check_hooks(module, "HeadsNorm", ("input", "output"))

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Return the norm with a mean over the heads of all ranks."""
        if context.tp.size == 1:
            return module
        self.check(module, context.layout, plan)
        norm = HeadsRMSNorm.from_norm(expect(module, nn.RMSNorm, "HeadsNorm"), context.tp)
        return partial_over(norm, context.tp)


@dataclass(frozen=True)
class StreamDropout:
    """A ``Dropout`` with inputs that differ between ranks.

    The layer draws from a stream of the rank.
    """

    splits = False

    always: bool = False
    """The input is sharded with and without sequence parallelism (attention probabilities)."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Set the streams."""
        sharded = plan.is_sequence_parallel(context) or (self.always and context.tp.size > 1)
        draw_from_stream(expect(module, Dropout, "StreamDropout"), context, sharded=sharded)
        return module
