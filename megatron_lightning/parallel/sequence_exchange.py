"""Exchange a part of the sequence with all heads for the full sequence with a part of the heads,
and back. Gather the parts of all ranks.

The exchange is an all-to-all (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509), for layers that
mix the sequence within a head: attention, state-space layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lightning.errors import ShardingError
from megatron_lightning.parallel.collectives import all_gather_start, finish
from megatron_lightning.parallel.deal import Deal
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.sequence import SequencePart, join


def gather_parts(part: Tensor, group: AxisGroup, dim: int, deal: Deal | None = None) -> Tensor:
    """Return the full tensor, given a rank's part of the sequence in dim ``dim``. Without gradient.
    A collective.
    """
    parts = finish(all_gather_start(part[None], group), group)
    return join(list(parts), dim, deal)


def sequence_to_heads(x: Tensor, group: AxisGroup, deal: Deal | None = None) -> Tensor:
    """Map a rank's part of the sequence [b, n, s / c, d] to [b, n / c, s, d]: the rank's share of
    the heads, over the full sequence in order. Differentiable. A collective.

    Args:
        x: The part.
        group: The ranks.
        deal: Their chunks of the sequence. None: zigzag.

    Raises:
        ShardingError: If the heads do not divide over the ranks.
    """
    if x.shape[1] % group.size:
        raise ShardingError(
            f"{x.shape[1]} heads cannot be divided over the {group.size} context-parallel ranks "
            'that exchange them. Set context_parallel_size, or with "a2a+p2p" the first of '
            "hierarchical_context_parallel_sizes, to a divisor of the heads of a tensor-parallel "
            'rank, or cp_comm_type to "p2p".'
        )
    result: Tensor = _SequenceToHeads.apply(x, group, deal)  # type: ignore[no-untyped-call]
    return result


def heads_to_sequence(x: Tensor, group: AxisGroup, deal: Deal | None = None) -> Tensor:
    """Undo :func:`sequence_to_heads`."""
    result: Tensor = _HeadsToSequence.apply(x, group, deal)  # type: ignore[no-untyped-call]
    return result


class _SequenceToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup, deal: Deal | None) -> Tensor:
        ctx.ranks = group, deal
        return _to_heads(x, group, deal)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return heads_to_sequence(grad, *ctx.ranks), None, None


class _HeadsToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup, deal: Deal | None) -> Tensor:
        ctx.ranks = group, deal
        return _to_sequence(x, group, deal)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return sequence_to_heads(grad, *ctx.ranks), None, None


def _to_heads(x: Tensor, group: AxisGroup, deal: Deal | None) -> Tensor:
    shares = torch.stack(x.chunk(group.size, 1))  # each rank's heads
    return join(list(_all_to_all(shares, group)), 2, deal)


def _to_sequence(x: Tensor, group: AxisGroup, deal: Deal | None) -> Tensor:
    parts = [SequencePart(rank, group.size, deal).split(x, 2) for rank in range(group.size)]
    return torch.cat(list(_all_to_all(torch.stack(parts), group)), 1)


def _all_to_all(blocks: Tensor, group: AxisGroup) -> Tensor:
    if group.process_group is None:
        return blocks
    sizes = [1] * group.size
    started = torch.ops._c10d_functional.all_to_all_single(
        blocks.contiguous(), sizes, sizes, group.process_group.group_name
    )
    result: Tensor = torch.ops._c10d_functional.wait_tensor(started)
    return result
