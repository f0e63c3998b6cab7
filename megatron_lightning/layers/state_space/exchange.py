"""Exchange a part of the sequence with all heads for the full sequence with a part of the heads, in
a layer that mixes every head by itself over the sequence.

    [s / c, b, all heads]  -- all-to-all -->  [s, b, heads / c]  -- all-to-all -->  [s / c, b, ...]

All tensors of a token travel in one message. Parameters of heads stay whole on every
context-parallel rank, and a rank uses a slice of them. The gradient of the slice sums over the full
sequence, and the gradients of the ranks add up over ``cp`` like any gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lightning.parallel.deal import Deal
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.sequence_exchange import heads_to_sequence, sequence_to_heads


def parts_to_heads(
    parts: Sequence[Tensor], group: AxisGroup, deal: Deal | None = None
) -> list[Tensor]:
    """Map parts [s / c, b, f] of this rank's tokens to [s, b, f / c]: the rank's share of the
    features, of all tokens in order. Differentiable. A collective.

    Args:
        parts: Of this rank.
        group: The context-parallel ranks.
        deal: Their chunks of the sequence. None: zigzag.
    """
    shares = [torch.unflatten(part, -1, (group.size, -1)) for part in parts]
    joined = torch.cat(shares, -1).permute(1, 2, 0, 3)  # [b, c, s / c, f / c of all parts]
    sequence = sequence_to_heads(joined, group, deal)[:, 0].transpose(0, 1)
    return list(torch.split(sequence, [share.shape[-1] for share in shares], -1))


def heads_to_part(full: Tensor, group: AxisGroup, deal: Deal | None = None) -> Tensor:
    """Undo :func:`parts_to_heads` for one tensor: map [s, b, f / c] to [s / c, b, f]."""
    heads = full.transpose(0, 1).unsqueeze(1)
    parts = heads_to_sequence(heads, group, deal)  # [b, c, s / c, f / c]
    return parts.permute(2, 0, 1, 3).flatten(2)


def repeated_heads(x: Tensor, heads: int, copies: int, dim: int = -1) -> Tensor:
    """Return a tensor with each of ``heads`` heads of a dim ``copies`` times, one behind the
    other.
    """
    if copies == 1:
        return x
    dim %= x.dim()
    return torch.unflatten(x, dim, (heads, -1)).repeat_interleave(copies, dim).flatten(dim, dim + 1)


def share_of(x: Tensor, group: AxisGroup, dim: int = 0) -> Tensor:
    """Return this rank's share of a parameter of heads."""
    return x.chunk(group.size, dim)[group.rank]
