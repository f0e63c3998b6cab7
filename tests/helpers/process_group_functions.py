"""Collectives along the first dim with gradients, for a plain process group: pairs of an operation
and its conjugate, written for tests of libraries that are given a group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


def _all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def _own(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(group.size())[group.rank()]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _own(_sum(grad, ctx.group), ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own(_sum(x, group), group).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all(grad, ctx.group), None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate; backward sums and takes the rank's part."""
    out: Tensor = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum and take the rank's part; backward concatenates."""
    out: Tensor = _ReduceScatter.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def share(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``x``; backward sums."""
    out: Tensor = _Share.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum; backward returns the gradient."""
    out: Tensor = _Reduce.apply(x, group)  # type: ignore[no-untyped-call]
    return out
