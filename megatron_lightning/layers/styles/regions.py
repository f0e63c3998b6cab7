"""Styles that enter or leave the tensor-parallel region, or the sequence-sharded region, at a
module with full parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megatron_lightning.layers.styles.adapters import partial_over
from megatron_lightning.parallel.collectives import (
    copy_to_axis,
    gather,
    gather_sequence,
    reduce_from_axis,
    scatter,
)
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.shards.sharding import ShardingPlan, declare_gathered_input

T = TypeVar("T")


@dataclass(frozen=True)
class ParallelInput:
    """A module with rank-local shards inside.

    The input is copied, or gathered from sequence shards.
    """

    splits = False

    argument: str = "hidden_states"
    """Name of the input, if not the first positional argument."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Copy (or gather) the input before the module's forward."""
        if context.tp.size == 1:
            return module
        sharded = plan.is_sequence_parallel(context)
        if sharded:
            declare_gathered_input(module, self.argument, plan.sequence_dim)
        enter = partial(gather_sequence, dim=plan.sequence_dim) if sharded else copy_to_axis
        hook = _MapInput(self.argument, partial(enter, group=context.tp))
        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module


@dataclass(frozen=True)
class ShardSequence:
    """The first module with sequence-sharded activations under sequence parallelism.

    The input is scattered.
    """

    splits = False

    shards_sequence = True

    argument: str = "hidden_states"
    """Name of the input, if not the first positional argument."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Scatter the input before the module's forward."""
        if not plan.is_sequence_parallel(context):
            return module
        shard = partial(scatter, group=context.tp, dim=plan.sequence_dim)
        module.register_forward_pre_hook(_MapInput(self.argument, shard), with_kwargs=True)
        return module


@dataclass(frozen=True)
class GatherSequence:
    """The last module with sequence-sharded activations under sequence parallelism: a norm.

    Weights: full, with gradients that are partial sums. Output: gathered. Backward: each rank takes
    the gradient of the local tokens.
    """

    splits = False

    shards_sequence = True

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Gather the output, and declare the gradients partial."""
        if not plan.is_sequence_parallel(context):
            return module
        module.register_forward_hook(_GatherOutput(context.tp, plan.sequence_dim))
        return partial_over(module, context.tp)


@dataclass(frozen=True)
class ReduceOutput:
    """A module whose output is a partial sum on each rank.

    Weights: full, or split by other styles. Input: unchanged. Output: all-reduced. The gradient
    passes unchanged.
    """

    splits = False

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """All-reduce the output."""
        if context.tp.size > 1:
            reduce_output(module, context.tp)
        return module


@dataclass(frozen=True)
class CopyOutput:
    """A replicated module whose last output channels enter every rank's heads unchanged.

    An example is the position part of the compressed keys in multi-head latent attention. The
    earlier channels pass a column-parallel layer that sums their gradient. Weights, input and
    forward: unchanged. Backward: the gradient of the last channels is all-reduced.
    """

    splits = False

    channels: int
    """Number of the last channels."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Sum these channels' gradients over the ranks."""
        if context.tp.size > 1:
            module.register_forward_hook(_CopyLast(self.channels, context.tp))
        return module

    def divide_adapters(
        self, module: nn.Module, context: ParallelContext, plan: ShardingPlan
    ) -> None:
        """Leave the adapters full: the output's gradient is summed after the adapters."""


@dataclass(frozen=True)
class ShareInput:
    """A module inside a region with summed outputs that computes the same on every rank (an expert
    that returns its input).

    Weights: none. Input: divided by the number of ranks, so that the sum holds the input once. The
        gradient is also divided. Output: unchanged.
    """

    splits = False

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Divide the first argument."""
        if context.tp.size > 1:
            module.register_forward_pre_hook(_Divide(context.tp.size))
        return module


def reduce_output(module: nn.Module, group: AxisGroup) -> None:
    """All-reduce the tensors returned by ``module``."""
    module.register_forward_hook(_Reduce(group))


def map_tensors(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """Return ``value`` with every tensor changed, including tensors in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return change(value)  # type: ignore[return-value]
    if type(value) in (tuple, list):
        return type(value)(map_tensors(item, change) for item in value)  # type: ignore
    if type(value) is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}  # type: ignore
    return value


FULL_SEQUENCE = "_full_sequence"
"""Attribute of a module whose hooks leave full sequences unchanged during a call."""


def sees_full_sequence(module: nn.Module) -> bool:
    """Return whether the hooks of ``module`` leave full sequences unchanged during this call."""
    return FULL_SEQUENCE in vars(module)


# Hooks are objects, not closures, so that modules can be copied and pickled.


@dataclass(frozen=True)
class _Reduce:
    group: AxisGroup

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return map_tensors(output, lambda y: reduce_from_axis(y, self.group))


@dataclass(frozen=True)
class _CopyLast:
    channels: int
    group: AxisGroup

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        first, last = output[..., : -self.channels], output[..., -self.channels :]
        return torch.cat((first, copy_to_axis(last, self.group)), dim=-1)


@dataclass(frozen=True)
class _Divide:
    ranks: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0] / self.ranks, *args[1:])


@dataclass(frozen=True)
class _GatherOutput:
    group: AxisGroup
    dim: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if sees_full_sequence(module):
            return output
        return gather(output, self.group, self.dim).contiguous()


@dataclass(frozen=True)
class _MapInput:
    argument: str
    change: Callable[[Tensor], Tensor]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if sees_full_sequence(module):
            return args, kwargs
        if args:
            return (self.change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, self.argument: self.change(kwargs[self.argument])}
