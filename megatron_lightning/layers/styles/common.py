"""Helpers of the styles."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from torch import nn

from megatron_lightning.layers.linear.replaceable import check_replaceable
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.parallel.shards.sharding import ShardingPlan, Style
from megatron_lightning.parallel.shards.spec import ShardSpec

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def keep(module: nn.Module, group: AxisGroup, *split: str) -> nn.Module:
    """Return ``module`` for a group of one rank, with the parameters ``split`` recorded as
    sharded.
    """
    parameters = module.named_parameters(recurse=False)
    specs = {
        n: ShardSpec.split(p.shape, dim=0, size=1, rank=0, axis=group.name)
        for n, p in parameters
        if n in split
    }
    module.shard_specs = specs  # type: ignore[assignment]
    return module


class AdditionalStyle:
    """A style of a module that may have another style."""

    also: Style | None
    """Another style of the same module, applied first."""

    @property
    def splits(self) -> bool:
        """See :class:`~megatron_lightning.parallel.shards.sharding.ShardingPlan`."""
        return self.also is not None and bool(getattr(self.also, "splits", True))

    @property
    def shards_sequence(self) -> bool:
        """See :class:`~megatron_lightning.parallel.shards.sharding.ShardingPlan`."""
        return bool(getattr(self.also, "shards_sequence", False))

    def apply_also(
        self, module: nn.Module, context: ParallelContext, plan: ShardingPlan
    ) -> nn.Module:
        """Return the module with the other style applied."""
        return module if self.also is None else self.also.apply(module, context, plan)


EMBEDDING: tuple[type[nn.Module], ...] = (nn.Embedding,)


def expect(module: nn.Module, kind: type[ModuleT], style: str) -> ModuleT:
    """Return ``module`` as a ``kind``.

    Raises:
        ShardingError: If the module is another kind.
    """
    if not isinstance(module, kind):
        check_replaceable(module, (kind,), style)
    return cast(ModuleT, module)


def layer_options(
    context: ParallelContext, plan: ShardingPlan, *, shards: bool = True
) -> dict[str, Any]:
    """Return the constructor keywords of all parallel layers.

    ``shards``: the layers gather or return sequence shards.
    """
    return {
        "group": context.tp,
        "sequence_parallel": is_sharded(context.layout, plan) and shards,
        "sequence_dim": plan.sequence_dim,
    }


def is_sharded(layout: ParallelLayout, plan: ShardingPlan) -> bool:
    """Return whether activations are sequence shards."""
    return layout.sp and plan.shards_sequence
