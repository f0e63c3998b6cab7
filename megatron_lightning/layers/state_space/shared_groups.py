"""Groups of heads that several tensor-parallel ranks share, because ranks outnumber the groups.

A rank has heads of one group. B and C of the group are computed in shards: each rank projects and
convolves its rows, and the rows are gathered for the scan. So parameters are sharded evenly, and no
rank repeats a row. Backward sums the gradients of the ranks that share a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lightning.parallel.collectives import gather_sequence
from megatron_lightning.parallel.grid.context import AxisGroup


@dataclass(frozen=True)
class SharedGroups:
    """Ranks that share groups."""

    axis: AxisGroup
    """The tensor-parallel ranks. Neighbors share a group."""
    num_groups: int
    """Groups of the model, a divisor of the number of ranks."""

    def gather(self, rows: Tensor) -> Tensor:
        """Map this rank's rows [..., w] of all groups' rows to the rows of this rank's group. A
        collective.
        """
        groups = torch.unflatten(gather_sequence(rows, self.axis, -1), -1, (self.num_groups, -1))
        group_rows: Tensor = groups[..., self._group, :]
        return group_rows

    def mean(self, part: Tensor) -> Tensor:
        """Return the mean [..., 1] over the ranks of this rank's group. A collective."""
        return self.gather(part).mean(-1, keepdim=True)

    @property
    def _group(self) -> int:
        return self.axis.rank * self.num_groups // self.axis.size
