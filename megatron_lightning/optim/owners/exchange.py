"""Full tensors for optimizers that read them: one rank owns and steps each.

Ranks hold flat shards (ZeRO-1), rows (FSDP2), or rows and columns (tensor parallelism) of a
parameter. The owner keeps the full tensor in fp32 and the optimizer's state. A step:

    gather_gradients()    shards of gradients go to the owners         all-to-all
    optimizer.step()      every rank steps the tensors that it owns
    scatter_results()     shards of the results return to the holders  all-to-all

Messages carry several units, as many elements for each owner as the largest unit has: so a rank
holds main params and gradients of what it owns, a message received and one sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.optim.gradients.gradient_proxies import gradient_of
from megatron_lightning.optim.gradients.parameter_shard import main_dtype
from megatron_lightning.optim.owners.assignment import Assignment, Holding, Piece
from megatron_lightning.optim.owners.traffic import Traffic
from megatron_lightning.optim.owners.units import Units, is_stack
from megatron_lightning.optim.stepping.entries import OptimizerEntry, Owned, Target
from megatron_lightning.optim.stepping.main_params import take_over
from megatron_lightning.optim.write_watch import WriteWatch
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.shards.spec import Shard

_DIVIDED = (
    "The ranks that hold shards of a parameter step it on one of them, which does not see what "
    "hooks write into the shards of others. Write weights in hooks of the start or end of an epoch "
    "or validation, or after every step from the first one on, or step these weights by an "
    "element-wise optimizer, such as AdamW, alongside: ChainedOptimizer(..., AdamW(...))."
)


class Held(NamedTuple):
    """A parameter with owners."""

    entry: OptimizerEntry
    units: Units
    has_gradient: Callable[[], bool]
    """Whether the parameter has a gradient in this step. Equal on all ranks."""


class _Message(NamedTuple):
    """Part of an exchange, on this rank."""

    mine: list[int]
    """This rank's units."""
    received: list[list[Piece]]
    """Rank -> the rank's pieces of this rank's units."""
    given: list[list[Piece]]
    """Rank -> this rank's pieces of the rank's units."""


class Exchange:
    """Gather full tensors on the owners, and scatter stepped tensors.

    Construction sets the targets of the entries. Construction is a collective of ``group``, like
    the other methods.

    Args:
        held: The parameters, the same on all ranks of the group.
        group: The ranks with shards of the parameters. A group of size 1 for parameters to be split
            only.
        context: Groups of this rank.
        device: Device of the step. None: the device of the parameters.
    """

    def __init__(
        self,
        held: Sequence[Held],
        group: AxisGroup,
        context: ParallelContext,
        device: torch.device | None = None,
    ) -> None:
        self._held = held
        self._entries = [each.entry for each in held]
        self._group = group
        self._device = device
        ranks = group.all_gather_object([_holding(entry, context) for entry in self._entries])
        own_specs = [entry.spec for entry in self._entries]
        names = [entry.name for entry in self._entries]
        self._plan = plan = Assignment(names, own_specs, [each.units for each in held], ranks)
        self._sources = _messages(plan, group, sources=True)
        self._holders = _messages(plan, group, sources=False)
        dtypes = [holding.dtype for rank in ranks for holding in rank if holding.dtype is not None]
        # Parameters of several dtypes travel in one message.
        self._dtype = _common(dtypes)
        self._where = self._device_of_values()
        self.is_local = plan.num_sent(sources=False) == 0
        """Whether every rank holds all units that it owns, and nothing else."""
        self._dtypes: list[torch.dtype] = []
        for index, entry in enumerate(self._entries):
            holdings = [rank[index] for rank in ranks]
            dtype = _common([h.dtype for h in holdings if h.dtype is not None])
            self._dtypes.append(dtype)
            has_main = main_dtype(dtype) != dtype or any(h.is_main for h in holdings)
            entry.owned = Owned(group, held[index].units is not Units.MATRICES, has_main)
            entry.targets = []
        self._targets = self._make_targets()
        self._watch = WriteWatch()
        self.record()

    def traffic(self) -> Traffic:
        """Return what a step sends and keeps."""
        sent = self._plan.num_sent(sources=True) * main_dtype(self._dtype).itemsize
        sent += self._plan.num_sent(sources=False) * self._dtype.itemsize
        sizes = [prod(unit.box.shape) for unit in self._plan.units]
        stacks = [
            size
            for size, unit in zip(sizes, self._plan.units, strict=True)
            if self._held[unit.entry].units is Units.WHOLE
            and is_stack(self._entries[unit.entry].spec)
        ]
        largest, stack = max(sizes, default=0), max(stacks, default=0)
        return Traffic(sent, largest, tuple(self._plan.owned), stack)

    def record(self) -> None:
        """Record the parameters as they are now, equal to the rounded tensors of the owners, to
        find later writes.
        """
        if not self.is_local:
            self._watch.record(self._values())

    def look_for_writes(self) -> None:
        """Look before a step for writes into this rank's shards. The step would overwrite such
        writes.

        Raises:
            ConfigError: If shards were written. On GPUs a step later.
        """
        names = [entry.name for entry in self._entries if entry.shard is not None]
        self._watch.look(self._values(), names, _DIVIDED)

    def were_written(self) -> bool:
        """Return the same. Waits for the device."""
        return self._watch.was_written(self._values())

    def _values(self) -> list[Tensor]:
        return [entry.shard.value for entry in self._entries if entry.shard is not None]

    def _device_of_values(self) -> torch.device:
        return next((value.device for value in self._values()), torch.device("cpu"))

    def _make_targets(self) -> dict[int, list[nn.Parameter]]:
        """Return copies of this rank's units by number, several copies for fused matrices."""
        targets: dict[int, list[nn.Parameter]] = {}
        for number, full in self._gather_values():
            index, box = self._plan.units[number]
            entry, units = self._entries[index], self._held[index].units
            dtype = main_dtype(self._dtypes[index])
            targets[number] = [
                nn.Parameter(part.to(self._device or part.device, dtype, copy=True).contiguous())
                for part in units.split(full, entry.spec)
            ]
            entry.targets += [
                Target(target, partial(units.place, spec=entry.spec, box=box, number=part))
                for part, target in enumerate(targets[number])
            ]
        return targets

    def _parts_of(self, number: int, full: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the stepped tensors of a unit, each with its part of ``full``."""
        index = self._plan.units[number].entry
        parts = self._held[index].units.split(full, self._entries[index].spec)
        return list(zip(self._targets[number], parts, strict=True))

    def gather_gradients(self) -> None:
        """Set the gradient of every owned tensor, None for unused parameters. What this rank holds
        in one piece is a view of the reduced gradient.
        """
        gradients: list[Tensor | None] = []
        for entry in self._entries:
            if entry.shard is None:
                gradients.append(None)
                continue
            gradient = gradient_of(entry.shard.target)
            gradients.append(torch.zeros_like(entry.shard.value) if gradient is None else gradient)
        for number, full in self._gather(gradients, main_dtype(self._dtype)):
            is_used = self._held[self._plan.units[number].entry].has_gradient()
            for target, part in self._parts_of(number, full):
                target.grad = part.to(target) if is_used else None

    def scatter_results(self) -> None:
        """Copy the stepped tensors into the parameters of all ranks, and drop the gradients."""
        for targets in self._targets.values():
            for target in targets:
                target.grad = None
        values = [None if entry.shard is None else entry.shard.value for entry in self._entries]
        shards = self._shards_of(values)
        for message in self._holders:
            full = {number: self._joined(number) for number in message.mine}
            results = [
                [full[piece.unit][self._place_of(piece)] for piece in pieces]
                for pieces in message.received
            ]
            received = self._all_to_all(results, message.given, self._dtype)
            for pieces, data in zip(message.given, received, strict=True):
                for piece, part in zip(pieces, data, strict=True):
                    self._view(shards, piece).copy_(part)
        self.record()

    def _joined(self, number: int) -> Tensor:
        """Return a stepped unit."""
        index, box = self._plan.units[number]
        tensors = [target.detach() for target in self._targets[number]]
        joined = self._held[index].units.join(tensors, self._entries[index].spec)
        return joined.view(box.shape).to(self._where, self._dtype)

    def refresh(self, keep: Set[str]) -> None:
        """Copy the parameters into the owners' tensors, except parameters with a global name in
        ``keep``.
        """
        for number, full in self._gather_values():
            if self._entries[self._plan.units[number].entry].global_name not in keep:
                for target, part in self._parts_of(number, full):
                    target.data.copy_(part)

    def take_over(self) -> None:
        """Replace the elements of the owners' tensors written in the parameters."""
        for number, full in self._gather_values():
            dtype = self._dtypes[self._plan.units[number].entry]
            for target, part in self._parts_of(number, full):
                take_over(target.data, part.to(target.device, dtype))
        self.record()

    def _gather_values(self) -> Iterator[tuple[int, Tensor]]:
        values = [None if entry.shard is None else entry.shard.value for entry in self._entries]
        return self._gather(values, self._dtype)

    def _gather(
        self, local: Sequence[Tensor | None], dtype: torch.dtype
    ) -> Iterator[tuple[int, Tensor]]:
        """Send this rank's pieces of every unit to the owner. Yield this rank's full units with
        their numbers. A collective of all ranks, until the end.
        """
        shards = self._shards_of(local)
        for message in self._sources:
            pieces = [[self._view(shards, piece) for piece in some] for some in message.given]
            yield from self._assembled(message, self._all_to_all(pieces, message.received, dtype))

    def _assembled(
        self, message: _Message, received: Sequence[Sequence[Tensor]]
    ) -> Iterable[tuple[int, Tensor]]:
        """Return this rank's full units of a message, from the pieces of all ranks. A unit in one
        piece is the piece.
        """
        full: dict[int, Tensor] = {}
        for pieces, data in zip(message.received, received, strict=True):
            for piece, part in zip(pieces, data, strict=True):
                box = self._plan.units[piece.unit].box
                if piece.box == box:
                    full[piece.unit] = part.contiguous()
                    continue
                if piece.unit not in full:
                    full[piece.unit] = part.new_empty(box.shape)
                full[piece.unit][self._place_of(piece)] = part
        return full.items()

    def _shards_of(self, local: Sequence[Tensor | None]) -> list[list[Shard]]:
        """Return the shards of this rank's tensor of every parameter."""
        return [
            [] if entry.shard is None or tensor is None else entry.shard.shards(entry.spec, tensor)
            for entry, tensor in zip(self._entries, local, strict=True)
        ]

    def _view(self, shards: Sequence[Sequence[Shard]], piece: Piece) -> Tensor:
        """Return a piece of this rank's tensors."""
        shard = shards[self._plan.units[piece.unit].entry][piece.shard]
        return shard.data[piece.box.relative_to(shard.offset).slices]

    def _place_of(self, piece: Piece) -> tuple[slice, ...]:
        return piece.box.relative_to(self._plan.units[piece.unit].box.offset).slices

    def _all_to_all(
        self,
        sent: Sequence[Sequence[Tensor]],
        expected: Sequence[Sequence[Piece]],
        dtype: torch.dtype,
    ) -> list[list[Tensor]]:
        """Send a list of tensors to every rank. Return the tensors received from each rank: what
        this rank has for itself without a copy.
        """
        me = self._group.rank
        own = [tensor.to(dtype) for tensor in sent[me]]
        if self.is_local:
            return [own if rank == me else [] for rank in range(len(sent))]
        others = [[] if rank == me else list(tensors) for rank, tensors in enumerate(sent)]
        expected = [[] if rank == me else pieces for rank, pieces in enumerate(expected)]
        nothing = torch.empty(0, dtype=dtype, device=self._where)
        parts = [tensor.reshape(-1).to(dtype) for tensors in others for tensor in tensors]
        # Both sides know all sizes by the plan, so one message for each pair of ranks is enough.
        sizes = [sum(piece.numel for piece in pieces) for pieces in expected]
        data = nothing.new_empty(sum(sizes))
        dist.all_to_all_single(
            data,
            torch.cat([nothing, *parts]),
            sizes,
            [sum(tensor.numel() for tensor in tensors) for tensors in others],
            group=self._group.process_group,
        )
        numbers = [piece.numel for pieces in expected for piece in pieces]
        received = iter(data.split_with_sizes(numbers))
        lists = [[next(received).view(piece.box.shape) for piece in some] for some in expected]
        return [own if rank == me else some for rank, some in enumerate(lists)]


def _messages(plan: Assignment, group: AxisGroup, *, sources: bool) -> list[_Message]:
    """Return the messages of this rank in one direction.

    Args:
        plan: The plan.
        group: Ranks of the exchange.
        sources: Whether pieces of copies are left out.
    """
    ranks, me = range(group.size), group.rank
    received = [plan.pieces(rank, me, sources=sources) for rank in ranks]
    given = [plan.pieces(me, rank, sources=sources) for rank in ranks]

    def of(number: int, routes: Sequence[Sequence[Piece]]) -> list[list[Piece]]:
        return [[p for p in pieces if plan.message[p.unit] == number] for pieces in routes]

    return [
        _Message(
            [unit for unit in plan.owned_by(me) if plan.message[unit] == number],
            of(number, received),
            of(number, given),
        )
        for number in range(max(plan.message, default=-1) + 1)
    ]


def _holding(entry: OptimizerEntry, context: ParallelContext) -> Holding:
    """Return this rank's part of a parameter."""
    copies = {*entry.spec.replica_axes, *entry.spec.partial_over}
    is_source = all(context.axis(axis).rank == 0 for axis in copies)
    shard = entry.shard
    if shard is None:
        return Holding((), is_source, None, is_main=False)
    boxes = tuple(part.box for part in shard.shards(entry.spec, shard.value))
    return Holding(boxes, is_source, shard.value.dtype, shard.is_main)


def _common(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Return the dtype that holds values of all ``dtypes``."""
    common = dtypes[0]
    for dtype in dtypes[1:]:
        common = torch.promote_types(common, dtype)
    return common
