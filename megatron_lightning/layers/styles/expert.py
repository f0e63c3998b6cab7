"""Styles of layers of experts: experts are divided over ``ep``, and the width of each expert over
``etp``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.moe.dispatch import DISPATCHERS
from megatron_lightning.layers.moe.experts import GroupedLinear
from megatron_lightning.layers.moe.layer import MoELayer
from megatron_lightning.layers.moe.router import Router
from megatron_lightning.layers.styles.adapters import divide_experts
from megatron_lightning.layers.styles.common import expect
from megatron_lightning.parallel.collectives import all_reduce
from megatron_lightning.parallel.context import ALONE, ParallelContext
from megatron_lightning.parallel.sharding import ShardingPlan, take_shards
from megatron_lightning.parallel.spec import ShardSpec


@dataclass(frozen=True)
class ExpertParallel:
    """A :class:`MoELayer` that sends tokens to the ranks of their experts.

    Weights: weights of the children, by separate styles. Input and output: sequence shards. Without
    sequence parallelism tokens are replicated, and each rank dispatches a part.
    """

    splits = False

    shards_sequence: bool = True
    """See :class:`~megatron_lightning.parallel.sharding.ShardingPlan`."""

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
    """A :class:`Router` of tokens divided over tensor-parallel ranks.

    Weight: replicated. The gradient is a partial sum over this rank's tokens.
    """

    splits = False

    shards_sequence: bool = True
    """See :class:`~megatron_lightning.parallel.sharding.ShardingPlan`."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Set the router's ranks, in place."""
        layer = expect(module, Router, "ExpertRouter")
        spec = ShardSpec.replicated(layer.weight.shape, partial_over=("tp",))
        layer.shard_specs = {"weight": spec}  # type: ignore[assignment]
        layer.streams = context.rng
        group = context.axis("tp-cp" if context.sp else "cp")
        if group.size > 1:
            layer.sum_counts = partial(all_reduce, group=group)
        return layer


@dataclass(frozen=True)
class ExpertLinear:
    """Local experts of a :class:`GroupedLinear`.

    Weight: [E, out, in], experts sharded over ``ep``, and one dim of each expert over ``etp``.
    """

    dim: int
    """Dim divided by ``etp``: 1, the output's features, or 2, the input's features."""
    num_blocks: int = 1
    """Equal stacked blocks in ``dim``, each split (2 for gate and up)."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Take this rank's shards, in place."""
        layer = expect(module, GroupedLinear, "ExpertLinear")
        if layer.bias is not None and context.etp.size > 1:
            raise ShardingError(
                f"experts have biases, and expert_tensor_parallel_size is {context.etp.size}, so "
                "that each rank would add them. Set it to 1, or add_bias_linear to False."
            )
        ep: dict[str, Any] = {"size": context.ep.size, "rank": context.ep.rank, "axis": "ep"}
        etp: dict[str, Any] = {"size": context.etp.size, "rank": context.etp.rank, "axis": "etp"}
        shape = tuple(layer.weight.shape)
        part = ShardSpec.split(shape, dim=self.dim, blocks=self.num_blocks, **etp)
        specs = {"weight": ShardSpec.split(shape, dim=0, **ep).crossed(part)}
        if layer.bias is not None:
            specs["bias"] = ShardSpec.split(tuple(layer.bias.shape), dim=0, **ep)
        take_shards(layer, layer, specs)
        return layer

    def divide_adapters(
        self, module: nn.Module, context: ParallelContext, plan: ShardingPlan
    ) -> None:
        """Divide the adapters of the experts."""
        divide_experts(module, self, context, plan, divides_output=self.dim == 1)
