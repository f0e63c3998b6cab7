"""Means over the ranks that share a sequence. Every rank has computed the values of its own
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron_lightning.parallel.grid.context import AxisGroup


def gather_rows(local: Tensor, group: AxisGroup) -> Tensor:
    """Return the tensors of all ranks, concatenated on dim 0. A collective."""
    if group.size == 1:
        return local
    parts = [torch.empty_like(local) for _ in range(group.size)]
    dist.all_gather(parts, local.contiguous(), group=group.process_group)
    return torch.cat(parts)


def mean_over_context(output: Any, weight: Tensor, group: AxisGroup) -> Any:
    """Return the output of a step, with scalars averaged over the ranks of ``group``.

    Args:
        output: Output for this rank's tokens.
        weight: Weight of this rank's tokens in a mean.
        group: The context-parallel ranks.
    """
    if group.size == 1:
        return output
    leaves, spec = tree_flatten(output)
    places = [index for index, leaf in enumerate(leaves) if _is_scalar(leaf)]
    # The weight and all scalars in one message.
    local_values = torch.stack([weight.float(), *(leaves[index].float() for index in places)])
    ranks = gather_rows(local_values[None], group)
    weights = ranks[:, :1]
    ranks = ranks.masked_fill(weights == 0, 0.0)  # a mean of nothing is NaN
    means = (ranks * weights).sum(0) / weights.sum().clamp(min=torch.finfo(torch.float32).tiny)
    for index, mean in zip(places, means[1:], strict=True):
        leaves[index] = mean.to(leaves[index].dtype)
    reduced = tree_unflatten(leaves, spec)
    if isinstance(reduced, Mapping) and "num_items" in reduced:
        kind, total = torch.as_tensor(output["num_items"]).dtype, weights.sum()
        return {
            **reduced,
            "num_items": (total if kind.is_floating_point else total.round()).to(kind),
        }
    return reduced


def _is_scalar(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf.is_floating_point()
