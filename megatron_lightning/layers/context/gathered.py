"""Attention with gathered keys: every rank has the keys and values of the whole sequence while it
computes, and its own queries.

One all-gather in forward. Only the rank's parts are saved, so backward gathers again, and its
gradients of all keys are reduce-scattered, summed in fp32 (https://arxiv.org/abs/2407.21783,
section 3.3.2).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from megatron_lightning.config import AttentionBackend
from megatron_lightning.layers.context.blocks import Block, visible_blocks
from megatron_lightning.layers.context.kernels import Inputs, Output
from megatron_lightning.layers.context.merged import Gradients, Merged, Sharing
from megatron_lightning.layers.context.shared import differentiable
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
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequence: SequenceInfo,
        scale: float,
        *,
        backend: AttentionBackend = "auto",
    ) -> Tensor:
        """Map this rank's queries [b, n, s, d], keys and values [b, g, s, d] to outputs [b, n, s,
        d].
        """
        return _attend(Inputs(q, k, v), self.group, sequence, scale, backend)


def _gather(inputs: Inputs, group: AxisGroup) -> Tensor:
    """Return all keys and values [2, b, g, s, d], in the order of the sequence."""
    return gather_parts(torch.stack(inputs[1:]), group, 3)


def _scatter(gradients: Tensor, group: AxisGroup) -> Tensor:
    """Return the sum over the ranks of the gradients of this rank's keys and values."""
    parts = [SequencePart(rank, group.size).split(gradients, 3) for rank in range(group.size)]
    return finish(reduce_scatter_start(torch.stack(parts), group), group)[0]


def _blocks(length: int, sharing: Sharing) -> list[Block]:
    """Return the visible blocks of a sequence of ``length`` positions."""
    queries = SequencePart(sharing.group.rank, sharing.group.size).spans(length)
    edges = sorted({0, length, *(x.start for x in queries), *(x.stop for x in queries)})
    keys = [range(start, stop) for start, stop in pairwise(edges)]
    return visible_blocks(queries, keys, sharing.sequence)


class _Gathered:
    def __call__(self, inputs: Inputs, sharing: Sharing) -> Output:
        merged, gathered = Merged(inputs.q, sharing), _gather(inputs, sharing.group)
        merged.see(gathered, _blocks(gathered.shape[3], sharing))
        return Output(merged.out.to(inputs.q.dtype), merged.log_sum)

    def gradients(
        self, grad: Tensor, inputs: Inputs, output: Output, sharing: Sharing
    ) -> tuple[Tensor, Tensor]:
        gathered = _gather(inputs, sharing.group)
        gradients = Gradients(grad, inputs.q, output, sharing)
        sums = gradients.of(gathered, _blocks(gathered.shape[3], sharing))
        return gradients.q.to(inputs.q.dtype), _scatter(sums, sharing.group).to(inputs.k.dtype)


_attend = differentiable("gathered_attention", _Gathered())
