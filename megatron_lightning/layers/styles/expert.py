"""Styles of layers of experts: experts are sharded over ``ep``, and the width of each expert over
``etp``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from megatron_lightning.layers.moe.dispatch import DISPATCHERS
from megatron_lightning.layers.moe.experts import GroupedLinear
from megatron_lightning.layers.moe.layer import MoELayer
from megatron_lightning.layers.moe.router import Router
from megatron_lightning.layers.styles.adapters import divide_experts
from megatron_lightning.layers.styles.common import expect
from megatron_lightning.parallel.collectives import all_reduce
from megatron_lightning.parallel.grid.context import ALONE, ParallelContext
from megatron_lightning.parallel.shards.sharding import ShardingPlan, take_shards
from megatron_lightning.parallel.shards.spec import ShardSpec


@dataclass(frozen=True)
class ExpertParallel:
    """A :class:`MoELayer` that sends tokens to the ranks of their experts.

    Weights: weights of the children, by separate styles. Input and output: sequence shards. Without
    sequence parallelism tokens are replicated, and each rank dispatches a part.
    """

    splits = False

    shards_sequence: bool = True
    """See :class:`~megatron_lightning.parallel.shards.sharding.ShardingPlan`."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Set the layer's ranks, in place."""
        layer = expect(module, MoELayer, "ExpertParallel")
        group, moe = context.axis("etp-ep"), layer.router.moe
        if group.size > 1:
            dispatcher = DISPATCHERS[moe.token_dispatcher_type]
            layer.dispatcher = dispatcher(group, context.etp.size)
        layer.replicas = ALONE if context.sp else context.tp
        layer.sharing = (context.tp if context.sp else ALONE, context.cp)
        layer.global_counts.replicas = context.dp
        return layer


@dataclass(frozen=True)
class ExpertRouter:
    """A :class:`Router` of tokens split over tensor-parallel ranks.

    Weight and bias: replicated. The gradients are partial sums over this rank's tokens.
    """

    splits = False

    shards_sequence: bool = True
    """See :class:`~megatron_lightning.parallel.shards.sharding.ShardingPlan`."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Set the router's ranks, in place."""
        layer = expect(module, Router, "ExpertRouter")
        layer.shard_specs = {  # type: ignore[assignment]
            name: ShardSpec.replicated(parameter.shape, partial_over=("tp",))
            for name, parameter in layer.named_parameters(recurse=False)
        }
        layer.streams = context.rng
        group = context.axis("tp-cp" if context.sp else "cp")
        if group.size > 1:
            layer.sum_counts = partial(all_reduce, group=group)
        return layer


@dataclass(frozen=True)
class ExpertLinear:
    """Local experts of a :class:`GroupedLinear`.

    Weight: [E, out, in], experts sharded over ``ep``, and one dim of each expert over ``etp``.
    Bias: [E, out], sharded likewise. If ``etp`` divides the input's features, the ranks' outputs
    are partial sums, each with an equal share of the bias, and so is the bias's gradient.
    """

    dim: int
    """Dim sharded by ``etp``: 1, the output's features, or 2, the input's features."""
    num_blocks: int = 1
    """Equal stacked blocks in ``dim``, each split (2 for gate and up)."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Take this rank's shards, in place."""
        layer = expect(module, GroupedLinear, "ExpertLinear")
        ep: dict[str, Any] = {"size": context.ep.size, "rank": context.ep.rank, "axis": "ep"}
        etp: dict[str, Any] = {"size": context.etp.size, "rank": context.etp.rank, "axis": "etp"}
        shape = tuple(layer.weight.shape)
        part = ShardSpec.split(shape, dim=self.dim, blocks=self.num_blocks, **etp)
        specs = {"weight": ShardSpec.split(shape, dim=0, **ep).crossed(part)}
        if layer.bias is not None:
            shape = tuple(layer.bias.shape)
            if self.dim == 1:
                inner = ShardSpec.split(shape, dim=1, blocks=self.num_blocks, **etp)
            else:
                inner = ShardSpec.replicated(shape, partial_over=("etp",))
                layer.num_bias_shares = context.etp.size
            specs["bias"] = ShardSpec.split(shape, dim=0, **ep).crossed(inner)
        take_shards(layer, layer, specs)
        layer.group = context.etp
        return layer

    def divide_adapters(
        self, module: nn.Module, context: ParallelContext, plan: ShardingPlan
    ) -> None:
        """Divide the adapters of the experts."""
        divide_experts(module, self, context, plan, divides_output=self.dim == 1)
