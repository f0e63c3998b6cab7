"""Rows of an update that several ranks share."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lightning.layers.losses.policy_loss import RowParts
from megatron_lightning.parallel.collectives import copy_to_axis, reduce_from_axis
from megatron_lightning.parallel.grid.context import AxisGroup


class ContextRows(RowParts):
    """Rows whose tokens are divided over context-parallel ranks. Each rank has the losses of its
    own tokens, so that gradients of sums over a row are added up over the ranks.

    Args:
        group: The context-parallel ranks.
    """

    def __init__(self, group: AxisGroup) -> None:
        self.share = 1.0 / group.size
        self._group = group

    def sum(self, values: Tensor) -> Tensor:
        """See the base class."""
        return copy_to_axis(reduce_from_axis(super().sum(values), self._group), self._group)


def gather_ragged(values: Tensor, group: AxisGroup | None) -> Tensor:
    """Return ``values`` [n] of all ranks of a group, where each has a number of its own. A
    collective of the group.
    """
    if group is None or group.size == 1:
        return values
    parts = group.all_gather_object(values.cpu())
    return torch.cat(list(parts)).to(values.device)
