"""The gradient reduction of one optimizer step where FSDP2 shards the units.

Gradients of the units arrive reduced, as rows of the local parameters; the rest is reduced in buckets as under ZeRO-1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_lightning.config import DataParallelOptions
from megatron_lightning.optim.buckets import Fragment
from megatron_lightning.optim.fully_sharded import ShardedUnits, local_rows
from megatron_lightning.optim.reducer import GradientReducer
from megatron_lightning.parallel.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.sharding import ShardSpec


class FullyShardedReducer(GradientReducer):
    """Reduces gradients where FSDP2 shards the units: theirs arrive reduced, the rest is reduced in buckets as under ZeRO-1.

    Args:
        parameters: Name -> trainable parameter, sharded ones included, in registration order.
        specs: Name -> shard spec.
        context: The groups of this rank.
        units: The sharded units.
        whole: Names of the parameters whose optimizer needs all of them on one rank.
        options: Size of the buckets, and how they travel.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        specs: Mapping[str, ShardSpec],
        context: ParallelContext,
        *,
        units: ShardedUnits,
        whole: Set[str] = frozenset(),
        options: DataParallelOptions | None = None,
    ) -> None:
        rest = {name: parameter for name, parameter in parameters.items() if name not in units.names}
        super().__init__(rest, specs, context, sharded=True, whole=whole - units.names, options=options)
        self.units = units
        self._in_units = {name: p for name, p in parameters.items() if name in units.names and isinstance(p, DTensor)}
        self.parameters = dict(parameters)
        for name, parameter in self._in_units.items():
            fragment = _fragment(name, parameter, is_master=units.policy.compute_dtype is not None)
            if fragment is not None:
                self.fragments[name] = fragment
        self._sums: dict[str, Tensor] = {}
        self._exchange_group = self._group_of_matrices()
        self._used = torch.zeros(len(self._in_units), dtype=torch.uint8, device=context.device)
        self._partial = self._partial_places()

    def _group_of_matrices(self) -> AxisGroup:
        """Return the ranks that together hold each parameter of this stage once; all ranks call this alike."""
        return self.context.divide(self.context.axis("tp-dp-cp"), self.options.num_distributed_optimizer_instances)[0]

    def _partial_places(self) -> dict[AxisGroup, list[str]]:
        """Return which parameters of the units are summed over which further group."""
        by_group: dict[AxisGroup, list[str]] = {}
        for name in self._in_units:
            spec = self.specs[name]
            for group in (self.context.axis(axis, spec.grid) for axis in spec.partial_over):
                if group.size > 1:
                    by_group.setdefault(group, []).append(name)
        return by_group

    def rows_of(self, name: str) -> tuple[ShardSpec, AxisGroup] | None:
        """Return which rows of a matrix this rank has, which may be none, and the ranks that together have all of it."""
        if name not in self._in_units:
            return None
        parameter, spec = self._in_units[name], self.specs[name]
        _, start = local_rows(parameter)
        row = parameter.numel() // parameter.shape[0]
        group = self._exchange_group if "tp" in spec.sharded_over else self.units.groups.shard
        return spec.rows(start // row, parameter._local_tensor.shape[0]), group

    @property
    def exchanges(self) -> bool:
        """Whether optimizers step something else than the parameters themselves."""
        return True

    def is_plain(self, name: str) -> bool:
        """Return whether the optimizer steps the parameter itself."""
        return name not in self._in_units and super().is_plain(name)

    def is_sharded(self, name: str) -> bool:
        """Return whether data-parallel ranks step different parts of the parameter."""
        return name in self._in_units or super().is_sharded(name)

    def start_window(self) -> None:
        """Begin the accumulation of one optimizer step: there is no gradient yet."""
        super().start_window()
        self._sums = {}
        self.units.accumulate()

    def hide(self) -> None:
        """Take the gradients off the parameters; those that the units have reduced are added up here."""
        self._take_over()
        super().hide()

    def launch(self) -> None:
        """Take over what the units have reduced, then launch the rest."""
        self._take_over()
        super().launch()

    def _take_over(self) -> None:
        for name, parameter in self._in_units.items():
            gradient: Any = parameter.grad
            if gradient is not None:
                rows, _ = local_rows(gradient)
                self._sums[name] = rows if name not in self._sums else self._sums[name].add_(rows)
                parameter.grad = None

    def finish(self, scale: float | Tensor = 1.0) -> None:
        """Complete the reduction: the shards are summed over the other axes, scaled, and handed to the optimizers."""
        super().finish(scale)
        self.units.reshard()
        for name in self._unused_in_units():
            self._sums.pop(name, None)
        for group, names in self._partial.items():
            self._sum_over(group, [self._sums[name] for name in names if name in self._sums])
        if self._sums and (isinstance(scale, Tensor) or scale != 1.0):
            torch._foreach_mul_(list(self._sums.values()), scale)
        for name in self._in_units.keys() & self.fragments.keys():
            target, rows = self.fragments[name].target, self._sums.get(name)
            target.grad = None if rows is None else rows.view_as(target)
        self._sums = {}

    def _launch_in_order(self, *, everything: bool = False) -> None:
        """Wait with the buckets until the units are reduced, so that the collectives of all ranks come in one order."""
        if everything:
            super()._launch_in_order(everything=True)

    def _unused_in_units(self) -> list[str]:
        """Return the parameters of the units that no rank used in this step; a collective."""
        names, used = list(self._in_units), self._used
        if not names:
            return []
        mine = [self.units.used(parameter) for parameter in self._in_units.values()]
        used.copy_(torch.tensor(mine, dtype=torch.uint8))
        for group, partial in self._partial.items():
            places = [names.index(name) for name in partial]
            part = used[places]
            self._all_reduce(part, group, dist.ReduceOp.MAX)
            used[places] = part
        self._all_reduce(used, self.context.dp_cp, dist.ReduceOp.MAX)
        if all(mine):  # reading the flags waits for the device; only a rank that lacks a gradient needs to
            return []
        return [name for name, by_any in zip(names, used.tolist(), strict=True) if not by_any]

    def _sum_over(self, group: AxisGroup, shards: Sequence[Tensor]) -> None:
        """Sum over ranks that hold the same parameters, in one message; all of them have the same shards."""
        if not shards:
            return
        buffer = torch.cat(list(shards))
        self.bytes_communicated["all_reduce"] += buffer.nbytes
        dist.all_reduce(buffer, group=group.process_group)
        for shard, summed in zip(shards, torch.split(buffer, [shard.numel() for shard in shards]), strict=True):
            shard.copy_(summed)


def _fragment(name: str, parameter: DTensor, *, is_master: bool) -> Fragment | None:
    """Return this rank's rows as what an optimizer steps: they share the sharded parameter's memory."""
    rows, start = local_rows(parameter)
    if rows.numel() == 0:
        return None
    whole = rows.numel() == parameter.numel()
    value = rows.view(parameter.shape) if whole else rows
    return Fragment(name, start, whole, value, value, nn.Parameter(value), is_master=is_master)
