"""Attention with gathered keys: every rank has the keys and values of the whole sequence while it
computes, and its own queries.

One all-gather in forward. Only the rank's parts are saved, so backward gathers again, and its
gradients of all keys are reduce-scattered, summed in fp32 (https://arxiv.org/abs/2407.21783,
section 3.3.2).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.layers.context.blocks import Block, visible_blocks
from megatron_lightning.layers.context.kernels import Output
from megatron_lightning.layers.context.merged import Gradients, Merged, Sharing
from megatron_lightning.layers.sequence_info import SequenceInfo
from megatron_lightning.parallel.collectives import finish, reduce_scatter_start
from megatron_lightning.parallel.context import AxisGroup
from megatron_lightning.parallel.sequence import SequencePart
from megatron_lightning.parallel.sequence_exchange import gather_parts


class GatheredAttention:
    """Attention between the queries of a rank and gathered keys.

    Args:
        group: The context-parallel ranks.
    """

    def __init__(self, group: AxisGroup) -> None:
        self.group = group

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sequence: SequenceInfo, scale: float
    ) -> Tensor:
        """Map this rank's queries [b, n, s, d], keys and values [b, g, s, d] to outputs [b, n, s,
        d].
        """
        output: Tensor = _Gathered.apply(q, k, v, _Plan(self.group, sequence, scale))  # type: ignore[no-untyped-call]
        return output


class _Plan(Sharing):
    """Gathering, and the visible blocks."""

    def gather(self, k: Tensor, v: Tensor) -> Tensor:
        """Return all keys and values [2, b, g, s, d], in the order of the sequence."""
        return gather_parts(torch.stack([k, v]), self.group, 3)

    def scatter(self, gradients: Tensor) -> Tensor:
        """Return the sum over the ranks of the gradients of this rank's keys and values."""
        parts = [self._part(rank).split(gradients, 3) for rank in range(self.group.size)]
        return finish(reduce_scatter_start(torch.stack(parts), self.group), self.group)[0]

    def blocks(self, length: int) -> list[Block]:
        """Return the visible blocks of a sequence of ``length`` positions."""
        queries = self._part(self.group.rank).spans(length)
        edges = sorted({0, length, *(x.start for x in queries), *(x.stop for x in queries)})
        keys = [range(start, stop) for start, stop in pairwise(edges)]
        return visible_blocks(queries, keys, self.sequence)

    def _part(self, rank: int) -> SequencePart:
        return SequencePart(rank, self.group.size)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> Tensor:
        merged, gathered = Merged(q, plan.scale), plan.gather(k, v)
        merged.see(gathered, plan.blocks(gathered.shape[3]))
        output = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, merged.log_sum)
        ctx.plan = plan
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, log_sum = ctx.saved_tensors
        plan: _Plan = ctx.plan
        gathered = plan.gather(k, v)
        gradients = Gradients(grad, q, Output(out, log_sum), plan.scale)
        sums = gradients.of(gathered, plan.blocks(gathered.shape[3]))
        grad_k, grad_v = plan.scatter(sums).to(k.dtype)
        return gradients.q.to(q.dtype), grad_k, grad_v, None
