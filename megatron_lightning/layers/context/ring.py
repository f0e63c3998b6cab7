"""Ring attention: keys and values travel from rank to rank while each rank computes.

Every rank keeps its queries. In c steps the keys and values of all c ranks pass by. The next keys
travel while the present keys are used, so a rank holds at most two shards beside its own. Outputs
of the steps are merged by the log-sum-exps of the scores (https://arxiv.org/abs/2310.01889, section
3):

    lse = log(exp(lse_1) + exp(lse_2))        out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

Only the rank's queries, keys, values, output and log-sum-exps are saved. In backward the keys and
values pass by again. The sums of their gradients follow one step behind, in fp32, until they reach
the owner:

    step        0         1             2               ...  c-1
    rank r has  kv(r)     kv(r-1)       kv(r-2)              kv(r+1)
    sends on    -         dkv(r-1)      dkv(r-2)             dkv(r+1), to its owner
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.layers.context.blocks import Block, visible_blocks
from megatron_lightning.layers.context.kernels import Inputs, Output
from megatron_lightning.layers.context.merged import Gradients, Merged, Sharing
from megatron_lightning.layers.context.shared import GroupAttention, differentiable
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.sequence import SequencePart


class RingAttention(GroupAttention):
    """Attention between the queries of a rank and the keys of all ranks of a group.

    Args:
        group: The context-parallel ranks. One rank: attention of full sequences.
    """

    def __init__(self, group: AxisGroup) -> None:
        super().__init__(group, _attend)


class _Passing:
    """A tensor in flight to the next rank, and the previous rank's tensor in flight to this
    rank.
    """

    def __init__(self, tensor: Tensor, group: AxisGroup) -> None:
        self._received = torch.empty_like(tensor)
        self._sent = tensor  # keeps the tensor alive until sent
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


def _steps(keys_and_values: Tensor, sharing: Sharing) -> Iterator[tuple[Tensor, list[Block]]]:
    """Yield the keys and values [2, b, g, s, d] of every rank, beginning with this rank, and the
    blocks visible to the rank's queries.
    """
    group, sequence = sharing.group, sharing.sequence
    num_keys = keys_and_values.shape[3] * group.size
    queries = SequencePart(group.rank, group.size, sequence.deal).spans(num_keys)
    for step in range(group.size):
        last = step == group.size - 1
        passing = None if last else _Passing(keys_and_values, group)
        owner = SequencePart((group.rank - step) % group.size, group.size, sequence.deal)
        yield keys_and_values, visible_blocks(queries, owner.spans(num_keys), sequence)
        if passing is not None:
            keys_and_values = passing.wait()


class _Ring:
    def __call__(self, inputs: Inputs, sharing: Sharing) -> Output:
        merged = Merged(inputs.q, sharing)
        for keys_and_values, visible in _steps(torch.stack(inputs[1:]), sharing):
            merged.see(keys_and_values, visible)
        return Output(merged.out.to(inputs.q.dtype), merged.log_sum)

    def gradients(
        self, grad: Tensor, inputs: Inputs, output: Output, sharing: Sharing
    ) -> tuple[Tensor, Tensor]:
        gradients = Gradients(grad, inputs.q, output, sharing)
        parts = _steps(torch.stack(inputs[1:]), sharing)
        local_grad = gradients.of(
            *next(parts)
        )  # stays here. The other ranks' sum arrives at the end
        traveling: _Passing | None = None
        for keys_and_values, visible in parts:
            sums = gradients.of(keys_and_values, visible)
            if traveling is not None:
                sums += traveling.wait()
            traveling = _Passing(sums, sharing.group)
        if traveling is not None:
            local_grad += traveling.wait()
        return gradients.q.to(inputs.q.dtype), local_grad.to(inputs.k.dtype)


_attend = differentiable("ring_attention", _Ring())
