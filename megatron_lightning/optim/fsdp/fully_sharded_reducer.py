"""The gradient reduction of an optimizer step for units sharded by FSDP2.

FSDP2 gathers parameters. Gradients accumulate on the gathered parameters over micro-batches until
the unit is reduced here. The buffer of a unit is packed by destination rank. Each parameter's rows
are padded to the row count of the first rank.

    | p0: rank 0's rows | p1: rank 0's rows | ... | p0: rank 1's rows | p1: rank 1's rows | ...
    |                 to rank 0                   |                 to rank 1               | ...

Experts may be sharded along a dim other than the first (``sharded_unit``), evenly.

All other gradients are reduced in buckets as under ZeRO-1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from megatron_lightning.compat import set_grad_dtype
from megatron_lightning.config import DataParallelOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.fsdp.fully_sharded import ShardedUnits
from megatron_lightning.optim.fsdp.sharded_unit import Unit, local_shard
from megatron_lightning.optim.gradients.bucket_plan import sum_groups_of
from megatron_lightning.optim.gradients.bucket_reduction import Reduction
from megatron_lightning.optim.gradients.parameter_shard import ParameterShard, main_dtype
from megatron_lightning.optim.gradients.parameter_storage import ParameterStorage, StoredUnits
from megatron_lightning.optim.gradients.reducer import GradientReducer
from megatron_lightning.optim.gradients.usage import Beside, Usage
from megatron_lightning.parallel.grid.context import ALONE, AxisGroup, ParallelContext
from megatron_lightning.parallel.shards.spec import ShardSpec


class UnitGradients:
    """The reduction of a unit's gradients, from this rank's sums to this rank's shard of the sums
    over all ranks.

    Args:
        unit: The unit.
        names: Names of the parameters.
        sent_as: Dtype of gradients in the collectives. None: the dtype of the sums.
        bytes_communicated: Counts the size of the buffers given to each collective.
    """

    def __init__(
        self,
        unit: Unit,
        names: Sequence[str],
        sent_as: torch.dtype | None,
        bytes_communicated: Counter[str],
    ) -> None:
        self.unit = unit
        groups = unit.groups
        self._ranks = groups.shard.size
        self._within = replace(groups, replicas=ALONE)
        self._across = replace(
            groups, all=groups.replicas, shard=ALONE, replicas=ALONE, sharded=False
        )
        self._sent = sent_as, bytes_communicated
        self._places: dict[str, slice] = {}
        self._size = 0  # elements per rank
        for name in names:
            shape, dim = list(unit.shards[name].shape), _dim(unit.shards[name])
            shape[dim] = -(-shape[dim] // self._ranks)
            padded = math.prod(shape)
            self._places[name] = slice(self._size, self._size + padded)
            self._size += padded
        self.used: set[str] = set()
        """Parameters with a gradient on this rank in this step."""
        self._sum: Tensor | None = None  # this rank's shard, summed over the reductions
        self._reduction: Reduction | None = None  # in progress, inside or between instances
        self._part: Tensor | None = None  # this rank's shard of the buffer in reduction
        self._last = False

    def clear(self) -> None:
        """Forget the gradients of a step."""
        for parameter in self.unit.gathered.values():
            parameter.grad = None
        self.used.clear()
        self._sum = self._reduction = self._part = None

    def start(self, last: bool) -> None:
        """Begin to reduce the gradients. ``last``: the last reduction of the step."""
        if self._size:
            buffer = self._pack().view(-1)
            self._reduction = Reduction(buffer, self._within, *self._sent)
            self._last = last
            self._part = buffer[self._within.shard_of(buffer.numel())]

    def wait(self) -> None:
        """Wait for the started reduction, and free the shards of other ranks."""
        if self._reduction is None or self._part is None:
            return
        self._reduction.finish()
        self._sum = self._part.clone() if self._sum is None else self._sum.add_(self._part)
        self._reduction = Reduction(self._sum, self._across, *self._sent) if self._last else None
        self._part = None

    def finish(self) -> dict[str, Tensor]:
        """Wait for the sums. Return this rank's padded shards by name."""
        if self._reduction is not None:
            self._reduction.finish()
        return (
            {}
            if self._sum is None
            else {name: self._sum[place] for name, place in self._places.items()}
        )

    def _pack(self) -> Tensor:
        """Move the gradients into a buffer [ranks, size], with zeros for padding and missing
        gradients.
        """
        like = next(iter(self.unit.shards.values()))
        # The buffer has a row for each rank, with the shards of all parameters behind each other:
        # one reduce-scatter hands every rank its row. FSDP2 shards dim d in chunks of ceil(n /
        # ranks) rows: the last rank with data may hold fewer, and later ranks hold none.
        buffer = torch.zeros(
            self._ranks, self._size, dtype=main_dtype(like.dtype), device=like.device
        )
        for name, place in self._places.items():
            parameter = self.unit.gathered.get(name)
            gradient = None if parameter is None else parameter.grad
            if parameter is None or gradient is None or not gradient.numel():
                continue
            dim = _dim(self.unit.shards[name])
            gradient = gradient.movedim(dim, 0)
            rows = -(-len(gradient) // self._ranks)
            num_full = len(gradient) // rows  # ranks with as many rows as the first
            last_rows = gradient[num_full * rows :].reshape(-1)
            even = gradient[: num_full * rows].reshape(num_full, rows, *gradient.shape[1:])
            part = even.movedim(1, dim + 1)
            buffer[:num_full, place].view(part.shape).copy_(part)
            if last_rows.numel():
                buffer[num_full, place][: last_rows.numel()] = last_rows
            self.used.add(name)
            # Frees the gradient as soon as it is copied, so that gradient and buffer exist twice
            # for one parameter alone.
            parameter.grad = None
        return buffer


class FullyShardedReducer(GradientReducer):
    """Reduce gradients of FSDP2 units into rows, and all other gradients in buckets as under
    ZeRO-1.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        specs: Mapping[str, ShardSpec],
        context: ParallelContext,
        *,
        units: ShardedUnits,
        options: DataParallelOptions | None = None,
        storage: ParameterStorage | None = None,
    ) -> None:
        outside_units = {
            name: parameter for name, parameter in parameters.items() if name not in units.names
        }
        super().__init__(
            outside_units,
            specs,
            context,
            sharded=True,
            options=options,
            storage=storage,
        )
        self.units = units
        self._in_units = {
            name: p
            for name, p in parameters.items()
            if name in units.names and isinstance(p, DTensor)
        }
        _check_main_params(self._in_units, units)
        self.parameters = dict(parameters)
        for name, parameter in self._in_units.items():
            shard = _shard_of(parameter, is_main=units.compute_dtype is not None)
            if shard is None:
                self.absent[name] = nn.Parameter(parameter.to_local().detach().new_empty(0))
            else:
                self.shards[name] = shard
        self._gradients = [
            UnitGradients(
                unit,
                [name for name in unit.shards if name in self._in_units],
                self._sent_as,
                self.bytes_communicated,
            )
            for unit in units.units
        ]
        # Reductions in progress by data group: only one at a time, to bound the memory.
        self._started: dict[str, UnitGradients] = {}
        units.reduce_by(self._reduce_unit)
        # Data group, and further groups to sum over -> parameters of the units.
        self._partial: dict[tuple[AxisGroup, tuple[AxisGroup, ...]], list[str]] = {}
        for name in self._in_units:
            data_group = units.groups[specs[name].data_axes].all
            sum_groups = sum_groups_of(specs[name], context)
            self._partial.setdefault((data_group, sum_groups), []).append(name)

    def frozen_shard(self, parameter: nn.Parameter) -> ParameterShard | None:
        """Return this rank's rows of a frozen parameter, or the full parameter outside of the
        units.
        """
        if not isinstance(parameter, DTensor):
            return super().frozen_shard(parameter)
        return _shard_of(parameter, is_main=self.units.compute_dtype is not None)

    @property
    def exchanges(self) -> bool:
        """Whether optimizers step other tensors than the parameters."""
        return True

    def is_plain(self, name: str) -> bool:
        """Return whether the optimizer steps the parameter itself."""
        return name not in self._in_units and super().is_plain(name)

    def is_sharded(self, name: str) -> bool:
        """Return whether data-parallel ranks step different shards of the parameter."""
        return name in self._in_units or super().is_sharded(name)

    def detach(self) -> None:
        """Remove the hooks and drop all gradients. The reducer is not used afterwards."""
        super().detach()
        for gradients in self._gradients:
            gradients.clear()

    @property
    def stored_units(self) -> StoredUnits:
        """Parameters of FSDP2's units."""
        return self.units.stored

    def begin_step(self) -> None:
        """Begin the accumulation of an optimizer step, without a gradient yet."""
        super().begin_step()
        self._wait_for_units()  # of an abandoned step
        for gradients in self._gradients:
            gradients.clear()
        self.units.accumulate()

    def _reduce_unit(self, index: int, last: bool) -> None:
        """Begin to reduce a unit, overlapped with the backward of the previous unit."""
        gradients = self._gradients[index]
        over = gradients.unit.groups.all.name
        if over in self._started:
            self._started.pop(over).wait()
        self._started[over] = gradients
        gradients.start(last)

    def _wait_for_units(self) -> None:
        for gradients in self._started.values():
            gradients.wait()
        self._started.clear()

    def finish(self, scale: float | Tensor = 1.0, beside: Beside | None = None) -> None:
        """Complete the reduction: the shards are summed over the other axes, scaled, and handed to
        the optimizers.
        """
        self._wait_for_units()
        super().finish(scale, beside)
        sums: dict[str, Tensor] = {}
        for gradients in self._gradients:
            sums.update(
                (name, rows)
                for name, rows in gradients.finish().items()
                if name not in self._unused
            )
        self.units.reshard()
        for (_, groups), names in self._partial.items():
            for group in groups:
                self._sum_over(group, [sums[name] for name in names if name in sums])
        if sums and (isinstance(scale, Tensor) or scale != 1.0):
            torch._foreach_mul_(list(sums.values()), scale)
        for name in self._in_units.keys() & self.shards.keys():
            target, rows = self.shards[name].target, sums.get(name)
            target.grad = None if rows is None else rows[: target.numel()].view_as(target)

    def _launch_in_order(self, *, everything: bool = False) -> None:
        """Launch the buckets after the units: all ranks run the collectives in the same order."""
        if everything:
            super()._launch_in_order(everything=True)

    def _usage(self) -> list[Usage]:
        used_names = set[str]().union(*(gradients.used for gradients in self._gradients))
        units = [
            Usage(names, [name in used_names for name in names], sums, data_group)
            for (data_group, sums), names in self._partial.items()
        ]
        return super()._usage() + units

    def _sum_over(self, group: AxisGroup, shards: Sequence[Tensor]) -> None:
        """Sum over the ranks of equal shards, in a single message."""
        if not shards:
            return
        buffer = torch.cat(list(shards))
        self.all_reduce(buffer, group)
        for shard, summed in zip(
            shards, torch.split(buffer, [shard.numel() for shard in shards]), strict=True
        ):
            shard.copy_(summed)


def _check_main_params(trained: Mapping[str, DTensor], units: ShardedUnits) -> None:
    """Check that no trained parameter was frozen at the time of sharding.

    Raises:
        ConfigError: Naming the parameters.
    """
    low = [n for n, p in trained.items() if units.compute_dtype and p.dtype != main_dtype(p.dtype)]
    if low:
        more = f" and {len(low) - 1} more" if len(low) > 1 else ""
        dtype = str(units.compute_dtype).removeprefix("torch.")
        raise ConfigError(
            f'{low[0]}{more} was frozen when data_parallel="fsdp" sharded the module, so that it '
            f"is kept in {dtype} without fp32 main params, and it is to be trained now. Freeze it "
            "by a BaseFinetuning callback, which announces the change, or set "
            'data_parallel="zero1".'
        )


def _dim(tensor: DTensor) -> int:
    """Return the sharded dim of a tensor."""
    [placement] = tensor.placements
    return placement.dim if isinstance(placement, Shard) else 0


def _shard_of(parameter: DTensor, *, is_main: bool) -> ParameterShard | None:
    """Return this rank's shard, in the memory of the sharded parameter. None: an empty shard."""
    values, box = local_shard(parameter)
    if values.numel() == 0:
        return None
    is_full = values.numel() == parameter.numel()
    value = values.view(parameter.shape) if is_full else values.view(-1)
    target = nn.Parameter(value)
    set_grad_dtype(target, main_dtype(value.dtype))
    start = sum(
        first * math.prod(parameter.shape[dim + 1 :]) for dim, first in enumerate(box.offset)
    )
    is_main &= value.dtype == main_dtype(value.dtype)  # a frozen parameter keeps the dtype
    return ParameterShard(start, is_full, value, value, target, is_main=is_main, box=box)
