"""Ring attention: keys and values travel from rank to rank while each computes with what it has.

Every rank keeps its queries. In c steps the keys and values of all c ranks pass by; the next ones
travel while the present ones are used, so that at most two parts are held beside the rank's own.
Outputs of the steps are merged by the log-sum-exps of their scores (https://arxiv.org/abs/2310.01889,
section 3):

    lse = log(exp(lse_1) + exp(lse_2))        out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

Only the rank's queries, keys, values, output and log-sum-exps are saved. In backward the keys and
values pass by again, and the sums of their gradients follow them one step behind, in fp32, until
they have come home:

    step        0         1             2               ...  c-1
    rank r has  kv(r)     kv(r-1)       kv(r-2)              kv(r+1)
    sends on    -         dkv(r-1)      dkv(r-2)             dkv(r+1), to its owner
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.layers.context.blocks import Block, visible_blocks
from megatron_lightning.layers.context.kernels import Output
from megatron_lightning.layers.context.merged import Gradients, Merged, Sharing
from megatron_lightning.layers.sequence_info import SequenceInfo
from megatron_lightning.parallel.context import AxisGroup
from megatron_lightning.parallel.sequence import SequencePart


class RingAttention:
    """Attention between the queries of a rank and the keys of all ranks of a group.

    Args:
        group: The context-parallel ranks; one rank: attention of full sequences.
    """

    def __init__(self, group: AxisGroup) -> None:
        self.group = group

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sequence: SequenceInfo, scale: float
    ) -> Tensor:
        """Map this rank's queries [b, n, s, d], keys and values [b, g, s, d] to outputs [b, n, s,
        d].
        """
        output: Tensor = _Ring.apply(q, k, v, _Plan(self.group, sequence, scale))  # type: ignore[no-untyped-call]
        return output


class _Passing:
    """A tensor on its way to the next rank, and that of the rank before on its way here."""

    def __init__(self, tensor: Tensor, group: AxisGroup) -> None:
        self._received = torch.empty_like(tensor)
        self._sent = tensor  # alive until it is sent
        following = group.ranks[(group.rank + 1) % group.size]
        preceding = group.ranks[group.rank - 1]
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, following, group.process_group),
                dist.P2POp(dist.irecv, self._received, preceding, group.process_group),
            ]
        )

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


class _Plan(Sharing):
    """Blocks of every step of the ring."""

    def steps(self, keys_and_values: Tensor) -> Iterator[tuple[Tensor, list[Block]]]:
        """Yield the keys and values [2, b, g, s, d] of every rank, the own ones first, and the
        blocks in which the rank's queries see them.
        """
        group, cached = self.group, self.sequence.num_cached
        full = keys_and_values.shape[3] * group.size
        if cached:
            spans = (range(cached), range(cached, full))
            yield keys_and_values, visible_blocks(spans[1:], spans, self.sequence)
            return
        queries = SequencePart(group.rank, group.size).spans(full)
        for step in range(group.size):
            last = step == group.size - 1
            passing = None if last else _Passing(keys_and_values, group)
            keys = SequencePart((group.rank - step) % group.size, group.size).spans(full)
            yield keys_and_values, visible_blocks(queries, keys, self.sequence)
            if passing is not None:
                keys_and_values = passing.wait()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> Tensor:
        merged = Merged(q, plan.scale)
        for keys_and_values, visible in plan.steps(torch.stack([k, v])):
            merged.see(keys_and_values, visible)
        output = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, merged.log_sum)
        ctx.plan = plan
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, log_sum = ctx.saved_tensors
        plan: _Plan = ctx.plan
        gradients = Gradients(grad, q, Output(out, log_sum), plan.scale)
        own: Tensor | None = None
        traveling: _Passing | None = None
        for keys_and_values, visible in plan.steps(torch.stack([k, v])):
            sums = gradients.of(keys_and_values, visible)
            if own is None:
                own = sums  # stays; what the other ranks add comes home at the end
                continue
            if traveling is not None:
                sums += traveling.wait()
            traveling = _Passing(sums, plan.group)
        if own is not None and traveling is not None:
            own += traveling.wait()
        grad_k, grad_v = (None, None) if own is None else own.to(k.dtype)
        return gradients.q.to(q.dtype), grad_k, grad_v, None
