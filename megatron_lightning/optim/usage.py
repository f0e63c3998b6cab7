"""Agreement on the parameters that no rank used in an optimizer step.

They have no gradient, so that optimizers skip them as they do on one device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_lightning.optim.codes import AllReduce
from megatron_lightning.parallel.context import AxisGroup


class Usage(NamedTuple):
    """Parameters that are reduced over the same ranks, and which of them received a gradient on
    this rank.
    """

    names: Sequence[str]
    touched: Sequence[bool]
    sum_groups: tuple[AxisGroup, ...]
    data_group: AxisGroup


class UsageAgreement:
    """One byte for each reduced parameter of a data group, reduced once a step.

    Args:
        usages: The parameters, as in every step.
        device: Device of the bytes.
        reduce: Reduces in place.
    """

    def __init__(self, usages: Sequence[Usage], device: torch.device, reduce: AllReduce) -> None:
        sizes: Counter[AxisGroup] = Counter()
        for usage in usages:
            sizes[usage.data_group] += len(usage.names)
        self._flags = {
            group: torch.zeros(size, dtype=torch.uint8, device=device)
            for group, size in sizes.items()
        }
        self._reduce = reduce

    def unused(self, usages: Sequence[Usage]) -> set[str]:
        """Return the names of the parameters that no rank used in this step. A collective."""
        unused: set[str] = set()
        for group, flags in self._flags.items():
            mine = [usage for usage in usages if usage.data_group is group]
            touched = [used for usage in mine for used in usage.touched]
            if all(touched):
                flags.fill_(1)
            else:
                flags.copy_(torch.tensor(touched, dtype=torch.uint8))
            first = 0
            for usage in mine:
                own = flags[first : first + len(usage.names)]
                for sum_group in usage.sum_groups:
                    self._reduce(own, sum_group, dist.ReduceOp.MAX)
                first += len(usage.names)
            if group.size > 1:
                self._reduce(flags, group, dist.ReduceOp.MAX)
            if not all(touched):  # reading the flags synchronizes with the device
                names = [name for usage in mine for name in usage.names]
                unused.update(
                    name for name, used in zip(names, flags.tolist(), strict=True) if not used
                )
        return unused
