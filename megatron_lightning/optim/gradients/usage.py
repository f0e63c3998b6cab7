"""Agreement on the parameters unused on all ranks in an optimizer step.

Unused parameters have no gradient: optimizers skip such parameters as on one device. Further values
to agree on once a step (:class:`Beside`) are sent in the same all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.optim.gradients.parameter_storage import AllReduce
from megatron_lightning.parallel.grid.context import AxisGroup


class Usage(NamedTuple):
    """Parameters with a reduction over the same ranks, and whether each received a gradient on this
    rank.
    """

    names: Sequence[str]
    touched: Sequence[bool]
    sum_groups: tuple[AxisGroup, ...]
    data_group: AxisGroup


class Beside(Protocol):
    """Bytes reduced over a data group by maximum."""

    group: AxisGroup

    def send(self) -> list[int]:
        """Return this rank's bytes, as many as the other ranks."""

    def receive(self, largest: Tensor) -> None:
        """Take the largest bytes of all ranks, on the device. Not called without bytes."""


class UsageAgreement:
    """A byte for each reduced parameter of a data group, reduced once a step.

    Args:
        usages: The parameters, as in every step.
        device: Device of the bytes.
        reduce: Function to reduce in place.
    """

    def __init__(self, usages: Sequence[Usage], device: torch.device, reduce: AllReduce) -> None:
        self._groups = list(dict.fromkeys(usage.data_group for usage in usages))
        self._device = device
        self._reduce = reduce
        self._last: dict[AxisGroup, tuple[list[int], Tensor]] = {}

    def unused(self, usages: Sequence[Usage], beside: Beside | None = None) -> set[str]:
        """Return the names of the parameters unused on all ranks in this step. A collective."""
        unused_names: set[str] = set()
        added = [] if beside is None else beside.send()
        groups = [*self._groups]
        if beside is not None and added and beside.group not in groups:
            groups.append(beside.group)
        for group in groups:
            mine = [usage for usage in usages if usage.data_group is group]
            touched = [used for usage in mine for used in usage.touched]
            is_joined = beside is not None and group == beside.group
            flags = self._flags(group, [*touched, *(added if is_joined else ())])
            first = 0
            # First over the further axes, a slice of the flags each, then all flags at once over
            # data ranks.
            for usage in mine:
                own_flags = flags[first : first + len(usage.names)]
                for sum_group in usage.sum_groups:
                    self._reduce(own_flags, sum_group, dist.ReduceOp.MAX)
                first += len(usage.names)
            if group.size > 1:
                self._reduce(flags, group, dist.ReduceOp.MAX)
            if beside is not None and is_joined and added:
                beside.receive(flags[len(touched) :])
            if not all(touched):  # reading the flags synchronizes with the device
                names = [name for usage in mine for name in usage.names]
                flags_of_names = zip(names, flags.tolist(), strict=False)
                unused_names.update(name for name, used in flags_of_names if not used)
        return unused_names

    def _flags(self, group: AxisGroup, values: list[int]) -> Tensor:
        """Return bytes of these values. Most steps repeat the values of the previous step, already
        on the device.
        """
        last = self._last.get(group)
        if last is None or last[0] != values:
            message = torch.tensor(values, dtype=torch.uint8).to(self._device)
            last = self._last[group] = values, message
        return last[1].clone()
