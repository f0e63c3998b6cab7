"""Means over the ranks that share a sequence: every one has computed those of its own tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron_lightning.parallel.context import AxisGroup


def gather_rows(local: Tensor, group: AxisGroup) -> Tensor:
    """Return the tensors of all ranks, concatenated on dim 0; a collective."""
    if group.size == 1:
        return local
    parts = [torch.empty_like(local) for _ in range(group.size)]
    dist.all_gather(parts, local.contiguous(), group=group.process_group)
    return torch.cat(parts)


def mean_over_context(output: Any, weight: Tensor, group: AxisGroup) -> Any:
    """Return what a step returned, with its scalars averaged over the ranks of ``group``.

    Args:
        output: Of this rank's tokens.
        weight: What they weigh in a mean.
        group: The context-parallel ranks.
    """
    if group.size == 1:
        return output
    leaves, spec = tree_flatten(output)
    places = [index for index, leaf in enumerate(leaves) if _is_scalar(leaf)]
    local = torch.stack([weight.float(), *(leaves[index].float() for index in places)])
    ranks = gather_rows(local[None], group)
    weights = ranks[:, :1]
    means = (ranks * weights).sum(0) / weights.sum().clamp(min=torch.finfo(torch.float32).tiny)
    for index, mean in zip(places, means[1:], strict=True):
        leaves[index] = mean.to(leaves[index].dtype)
    reduced = tree_unflatten(leaves, spec)
    if isinstance(reduced, Mapping) and "num_items" in reduced:
        return {
            **reduced,
            "num_items": weights.sum().round().to(torch.as_tensor(output["num_items"]).dtype),
        }
    return reduced


def _is_scalar(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf.is_floating_point()
