"""Check that data-parallel ranks call the FSDP2 units in the same order.

Every call of a unit is a collective of all data-parallel ranks. A rank without the call joins
another unit's collective instead. Both wait forever or, if the sizes agree, compute with wrong
weights. In the first step of a kind, the ranks compare call after call. Afterwards each rank alone
checks each call against the recorded order, before joining the collective.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_lightning.errors import ShardingError
from megatron_lightning.parallel.grid.context import AxisGroup

_END = -1


class UnitOrder:
    """Watch the calls of the units on this rank."""

    def __init__(self, names: Sequence[str], group: AxisGroup, device: torch.device) -> None:
        self._names = names
        self._group = group
        self._device = device
        self._known: dict[Hashable, list[int]] = {}
        self._kind: Hashable = None
        self._seen: list[int] = []

    def known(self, kind: Hashable) -> Sequence[int]:
        """Return the units called by a kind of forward, in order. Empty before the first run."""
        return self._known.get(kind, ())

    @contextmanager
    def forward(self, kind: Hashable) -> Generator[None, None, None]:
        """Check the calls of a forward of ``kind`` in the block. The first forward of a kind is a
        collective. A forward in another one, such as one without gradients in a step, has an order
        of its own.
        """
        outer = self._kind, self._seen
        self._kind, self._seen = kind, []
        try:
            yield
            self.called(_END)
        finally:
            self._kind, self._seen = outer

    @contextmanager
    def apart(self) -> Generator[None, None, None]:
        """Leave out the calls in the block: of a text engine, whose replicas agree on the number
        of their forwards in another way.
        """
        outer, self._kind = self._kind, None
        try:
            yield
        finally:
            self._kind = outer

    def called(self, unit: int) -> None:
        """Check the next call of a unit. Calls outside of :meth:`forward`, such as a recomputation,
        are ignored.
        """
        if self._kind is None:
            return
        known_order = self._known.get(self._kind)
        if known_order is None:
            self._compare(unit)
        elif unit != (known_order[len(self._seen)] if len(self._seen) < len(known_order) else _END):
            self._fail({self._group.ranks[self._group.rank]: unit}, known_order)
        if unit != _END:
            self._seen.append(unit)
        elif known_order is None:
            self._known[self._kind] = self._seen

    def _compare(self, unit: int) -> None:
        """Compare this call with the call on the other ranks. A collective."""
        if self._group.process_group is None:
            return
        units = [torch.zeros((), dtype=torch.int64, device=self._device) for _ in self._group.ranks]
        dist.all_gather(
            units, torch.tensor(unit, device=self._device), group=self._group.process_group
        )
        calls = {rank: int(other) for rank, other in zip(self._group.ranks, units, strict=True)}
        if len(set(calls.values())) > 1:
            self._fail(calls)

    def _fail(self, calls: dict[int, int], known: Sequence[int] | None = None) -> None:
        text = "; ".join(f"rank {rank} {self._describe(unit)}" for rank, unit in calls.items())
        if known is not None:
            expected_unit = known[len(self._seen)] if len(self._seen) < len(known) else _END
            text += (
                f", and until now every data-parallel rank {self._describe(expected_unit)} there"
            )
        raise ShardingError(
            f'{text}. With data_parallel="fsdp" the data-parallel ranks {list(self._group.ranks)} '
            "gather each unit together, "
            "so all of them must call the same units in the same order in every step. Let no "
            "branch by the data leave out a "
            'unit as a whole (a part of one may stay unused), or set data_parallel="zero1".'
        )

    def _describe(self, unit: int) -> str:
        return "ends its forward" if unit == _END else f"calls {self._names[unit]}"
