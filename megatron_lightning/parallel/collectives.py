"""Collectives over an axis as conjugate autograd pairs, the ``f`` and ``g`` of Megatron-LM
(https://arxiv.org/abs/1909.08053) and the sequence-parallel forms
(https://arxiv.org/abs/2205.05198).

    copy_to_axis      identity   / all-reduce      scatter         own shard      / all-gather
    reduce_from_axis  all-reduce / identity        gather          all-gather     / own shard
    gather_sequence   all-gather / reduce-scatter  reduce_scatter  reduce-scatter / all-gather

All functions use torch's functional collectives. On CPUs gathers and scatters use the operators of
``cpu_exchange``, which are complete when they return. ``torch.compile`` traces both, and activation
checkpointing may save or recompute both. No function works in place on the argument. Over an axis
of a single rank each function returns the argument. The functions with the suffix ``_start`` have
no gradient: until :func:`finish`, other work overlaps the communication.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.errors import ShardingError
from megatron_lightning.parallel import cpu_exchange  # noqa: F401  (registers its operators)
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.shards.spec import shard_range

_ops = torch.ops._c10d_functional


def _name(group: AxisGroup) -> str:
    if group.process_group is None:
        raise ShardingError(
            f"the group over {group.name} has {group.size} ranks and no communicator: it came from "
            "another process. Build the module again with this process's ParallelContext."
        )
    return group.process_group.group_name


def overlaps(x: Tensor) -> bool:
    """Return whether a gather or scatter of ``x`` overlaps other work. A gather or scatter of a CPU
    tensor is complete on return.
    """
    return x.device.type != "cpu"


def keeps_shard(x: Tensor, *, deferred: bool) -> bool:
    """Return whether a layer with a gathered input ``x`` keeps the shard for backward and gathers
    the shard again there, or keeps the gathered input.

    A layer keeps the shard if the second gather overlaps other work, and for a deferred weight
    gradient, which keeps inputs longest.
    """
    return deferred or overlaps(x)


def all_reduce_start(x: Tensor, group: AxisGroup, op: str = "sum") -> Tensor:
    """Begin to reduce ``x`` over the group. ``op`` is sum or max."""
    return x if group.size == 1 else _ops.all_reduce(x.contiguous(), op, _name(group))


def all_gather_start(x: Tensor, group: AxisGroup, dim: int = 0) -> Tensor:
    """Begin to concatenate the ranks' ``x`` along ``dim``."""
    if group.size == 1:
        return x
    gather = _ops.all_gather_into_tensor if overlaps(x) else torch.ops.megatron_lightning.all_gather
    started: Tensor = gather(x.movedim(dim, 0).contiguous(), group.size, _name(group))
    return started


def reduce_scatter_start(x: Tensor, group: AxisGroup, dim: int = 0) -> Tensor:
    """Begin to sum ``x`` over the group. This rank keeps a shard of the sum along ``dim``."""
    _shard_length(x, group, dim)
    if group.size == 1:
        return x
    x = x.movedim(dim, 0).contiguous()
    started: Tensor
    if overlaps(x):
        started = _ops.reduce_scatter_tensor(x, "sum", group.size, _name(group))
    else:
        started = torch.ops.megatron_lightning.reduce_scatter(x, group.size, _name(group))
    return started


def finish(started: Tensor, group: AxisGroup, dim: int = 0) -> Tensor:
    """Wait for a ``_start`` with the same ``dim`` and return the result (an all-reduce has dim
    0).
    """
    if group.size == 1:
        return started
    result: Tensor = _ops.wait_tensor(started)
    # Not a view if avoidable: autograd refuses writes into views that a Function returns.
    return result if dim == 0 else result.movedim(0, dim)


def all_reduce(x: Tensor, group: AxisGroup, op: str = "sum") -> Tensor:
    """Reduce ``x`` over the group, without a gradient."""
    return finish(all_reduce_start(x, group, op), group)


def exchange_rows(x: Tensor, sent: list[int], received: list[int], group: AxisGroup) -> Tensor:
    """Send blocks of the rows of ``x`` to the ranks of the group, without a gradient.

    Args:
        x: Rows for the first rank, for the second, and so on.
        sent: Rows for each rank.
        received: Rows from each rank.
        group: The ranks.
    """
    started = _ops.all_to_all_single(x.contiguous(), received, sent, _name(group))
    return finish(started, group)


def _shard_length(x: Tensor, group: AxisGroup, dim: int) -> int:
    """Return the extent of a rank's shard of ``x`` along ``dim``."""
    if x.shape[dim] % group.size:
        raise ShardingError(
            f"dim {dim} of an activation of shape {tuple(x.shape)} has {x.shape[dim]} entries, "
            f"which {group.size} {group.name} ranks cannot share equally. Pad the sequence to a "
            f"multiple of {group.size}, or set sequence_parallel to False."
        )
    return x.shape[dim] // group.size


class _CopyToAxis(torch.autograd.Function):
    """Identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _ReduceFromAxis(torch.autograd.Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherSequence(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup, dim: int) -> Tensor:
        ctx.group = group
        ctx.dim = dim
        return finish(all_gather_start(x, group, dim), group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (
            finish(reduce_scatter_start(grad, ctx.group, ctx.dim), ctx.group, ctx.dim),
            None,
            None,
        )


class _ReduceScatter(torch.autograd.Function):
    """Reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup, dim: int) -> Tensor:
        ctx.group = group
        ctx.dim = dim
        return finish(reduce_scatter_start(x, group, dim), group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return finish(all_gather_start(grad, ctx.group, ctx.dim), ctx.group, ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    """Own part forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup, dim: int) -> Tensor:
        ctx.group = group
        ctx.dim = dim
        length = _shard_length(x, group, dim)
        return x.narrow(dim, group.rank * length, length).clone(
            memory_format=torch.contiguous_format
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return finish(all_gather_start(grad, ctx.group, ctx.dim), ctx.group, ctx.dim), None, None


class _Gather(torch.autograd.Function):
    """All-gather forward, own shard backward. The last ranks' shards may be shorter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup, dim: int, total: int) -> Tensor:
        longest = shard_range(total, group.size, 0)[1]
        ctx.dim = dim
        ctx.start = shard_range(total, group.size, group.rank)[0]
        ctx.length = x.shape[dim]
        padded = x.movedim(dim, -1)
        padded = F.pad(padded, (0, longest - x.shape[dim])) if x.shape[dim] < longest else padded
        return finish(all_gather_start(padded.movedim(-1, dim), group, dim), group, dim).narrow(
            dim, 0, total
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.narrow(ctx.dim, ctx.start, ctx.length).contiguous(), None, None, None


def copy_to_axis(x: Tensor, group: AxisGroup) -> Tensor:
    """Identity forward, all-reduce backward: a replicated tensor enters a region of sharded
    computation.
    """
    return x if group.size == 1 else _apply(_CopyToAxis, x, group)


def reduce_from_axis(x: Tensor, group: AxisGroup) -> Tensor:
    """All-reduce forward, identity backward: partial sums leave such a region, replicated."""
    return x if group.size == 1 else _apply(_ReduceFromAxis, x, group)


def gather_sequence(x: Tensor, group: AxisGroup, dim: int = 0) -> Tensor:
    """All-gather forward, reduce-scatter backward: a sequence shard enters such a region, full
    along ``dim``.
    """
    return x if group.size == 1 else _apply(_GatherSequence, x, group, dim)


def reduce_scatter(x: Tensor, group: AxisGroup, dim: int = 0) -> Tensor:
    """Reduce-scatter forward, all-gather backward: partial sums leave such a region as sequence
    shards along ``dim``.
    """
    return x if group.size == 1 else _apply(_ReduceScatter, x, group, dim)


def scatter(x: Tensor, group: AxisGroup, dim: int = 0) -> Tensor:
    """Own part forward, all-gather backward: a replicated tensor is split along ``dim``."""
    return x if group.size == 1 else _apply(_Scatter, x, group, dim)


def gather(x: Tensor, group: AxisGroup, dim: int = -1, total: int | None = None) -> Tensor:
    """All-gather forward, own shard backward: shards along ``dim`` become a tensor used by every
    rank in the same way.

    ``total`` is the full extent, if the last ranks hold less than the other ranks. None: all ranks
    hold the same extent.
    """
    return (
        x if group.size == 1 else _apply(_Gather, x, group, dim, total or x.shape[dim] * group.size)
    )


def _apply(function: type[torch.autograd.Function], *args: object) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result
