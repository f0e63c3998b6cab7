"""Who owns each unit, and which pieces ranks exchange.

Every rank computes the same plan from the boxes of all ranks, so a step needs no messages beside
the pieces themselves. Gradients come from one copy of each element, the *sources*. Results go to
all holders: ranks may hold copies of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch

from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.owners.traffic import MESSAGE
from megatron_lightning.optim.owners.units import Units
from megatron_lightning.parallel.shards.spec import Box, ShardSpec

_ROOM = 1.1
"""Load of a holder that owns what it holds, relative to an even load: a tenth more memory on one
rank, for less to send."""


class Holding(NamedTuple):
    """A rank's part of a parameter."""

    boxes: tuple[Box, ...]
    """Ranges of the global parameter."""
    is_source: bool
    """Whether gradients come from this rank. Of equal copies one is the source."""
    dtype: torch.dtype | None
    """Dtype of the values. None: no values."""
    is_main: bool
    """Whether the values are main params."""


class Unit(NamedTuple):
    """Part of a parameter with one owner."""

    entry: int
    """Index of the parameter."""
    box: Box
    """Range of the unit in the global parameter."""


class Piece(NamedTuple):
    """A rank's piece of a unit."""

    unit: int
    box: Box
    """Range of the global parameter."""
    shard: int
    """Index of the piece's shard among the rank's boxes of the parameter."""

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return prod(self.box.shape)


class Assignment:
    """The plan of an exchange, equal on all ranks.

    Args:
        names: Names of the parameters, for errors.
        specs: This rank's spec of each parameter.
        units: Kind of the units of each parameter.
        ranks: Each rank's part of each parameter.

    Raises:
        ConfigError: If the ranks do not hold a parameter together.
    """

    def __init__(
        self,
        names: Sequence[str],
        specs: Sequence[ShardSpec],
        units: Sequence[Units],
        ranks: Sequence[Sequence[Holding]],
    ) -> None:
        self._ranks = ranks
        self.units = [
            Unit(index, box)
            for index, (kind, spec) in enumerate(zip(units, specs, strict=True))
            for box in kind.boxes(spec)
            if any(_overlaps(holdings[index].boxes, box) for holdings in ranks)
        ]
        weights = [prod(unit.box.shape) for unit in self.units]
        self.owner = assign_owners(
            weights,
            [self._candidates(unit, specs[unit.entry]) for unit in self.units],
            [self._num_held(unit) for unit in self.units],
        )
        """The owner of each unit."""
        self.owned = [0] * len(ranks)
        """Elements owned by each rank."""
        for weight, owner in zip(weights, self.owner, strict=True):
            self.owned[owner] += weight
        self._units_of: list[list[int]] = [[] for _ in ranks]
        for number, owner in enumerate(self.owner):
            self._units_of[owner].append(number)
        self.message = self._messages(weights)
        """The message of each unit."""
        self._check(names, weights)

    def owned_by(self, rank: int) -> list[int]:
        """Return the numbers of the units of a rank."""
        return self._units_of[rank]

    def _messages(self, weights: Sequence[int]) -> list[int]:
        """Return the message of each unit. A message has for every owner at most the elements of
        the largest unit, or ``MESSAGE`` if that is more.
        """
        limit = max((MESSAGE, *weights))
        places = [0] * len(weights)
        for rank in range(len(self._ranks)):
            place, filled = 0, 0
            for number in self.owned_by(rank):
                if filled + weights[number] > limit:
                    place, filled = place + 1, 0
                filled += weights[number]
                places[number] = place
        return places

    def pieces(self, holder: int, owner: int, *, sources: bool) -> list[Piece]:
        """Return the pieces that ``holder`` has of the units of ``owner``.

        Args:
            holder: A rank.
            owner: A rank.
            sources: Only pieces that gradients come from.
        """
        return [
            Piece(number, part, shard)
            for number in self.owned_by(owner)
            for shard, part in self._parts(holder, self.units[number], sources=sources)
        ]

    def num_sent(self, *, sources: bool) -> int:
        """Return the elements that go from one rank to another."""
        return sum(
            prod(part.shape)
            for unit, owner in zip(self.units, self.owner, strict=True)
            for rank in range(len(self._ranks))
            if rank != owner
            for _, part in self._parts(rank, unit, sources=sources)
        )

    def _parts(self, rank: int, unit: Unit, *, sources: bool) -> Iterable[tuple[int, Box]]:
        holding = self._ranks[rank][unit.entry]
        return () if sources and not holding.is_source else _overlaps(holding.boxes, unit.box)

    def _num_held(self, unit: Unit) -> list[int]:
        """Return the elements of a unit on each rank."""
        return [
            sum(prod(part.shape) for _, part in self._parts(rank, unit, sources=False))
            for rank in range(len(self._ranks))
        ]

    def _candidates(self, unit: Unit, spec: ShardSpec) -> list[int]:
        """Return the ranks that may own a unit. An expert stays with its holders, since other ranks
        have as many, and since expert parallelism would exchange most of a model.
        """
        everyone = range(len(self._ranks))
        if unit.box.shape == spec.global_shape:
            return list(everyone)
        return [rank for rank, held in enumerate(self._num_held(unit)) if held]

    def _check(self, names: Sequence[str], weights: Sequence[int]) -> None:
        found = [0] * len(self.units)
        for number, unit in enumerate(self.units):
            for rank in range(len(self._ranks)):
                parts = self._parts(rank, unit, sources=True)
                found[number] += sum(prod(part.shape) for _, part in parts)
        for unit, weight, count in zip(self.units, weights, found, strict=True):
            if count != weight:
                raise ConfigError(
                    f"{names[unit.entry]} is sharded in another way than over the ranks that step "
                    f"it: they hold {count} of {weight} elements, and an optimizer of full tensors "
                    "cannot step a part. Step it with an element-wise optimizer alongside: "
                    "ChainedOptimizer(..., AdamW(...))."
                )


def assign_owners(
    weights: Sequence[int], candidates: Sequence[Sequence[int]], held: Sequence[Sequence[int]]
) -> list[int]:
    """Return the owner of each unit: the largest first, each to the candidate that holds most of
    it, or else to the least loaded.

    If every rank is a candidate, the fullest has at most 4/3 of what it has in the best assignment
    (Graham 1969), which is the mean or the largest unit, or more where units are few: of nine equal
    units eight ranks have two at best.

    Args:
        weights: Elements of each unit.
        candidates: Ranks that may own each unit.
        held: Elements of each unit on each rank.
    """
    if not weights:
        return []
    limit = max(sum(weights) / len(held[0]), *weights)
    owner = _assign(weights, candidates, held, _ROOM * limit)
    if max(_loads(weights, owner)) > 4 / 3 * limit:
        owner = _assign(weights, candidates, held, 0.0)
    return owner


def _assign(
    weights: Sequence[int],
    candidates: Sequence[Sequence[int]],
    held: Sequence[Sequence[int]],
    limit: float,
) -> list[int]:
    """Return owners: holders up to a limit of their load."""
    load, owner = [0] * len(held[0]), [0] * len(weights)
    for index in sorted(range(len(weights)), key=lambda i: (len(candidates[i]), -weights[i])):
        has, ranks = held[index], candidates[index]
        rank = min(ranks, key=lambda rank: (-has[rank], load[rank], rank))
        if load[rank] + weights[index] > limit:
            rank = min(ranks, key=lambda rank: (load[rank], -has[rank], rank))
        owner[index] = rank
        load[rank] += weights[index]
    return owner


def _loads(weights: Sequence[int], owner: Sequence[int]) -> list[int]:
    load = [0] * (max(owner) + 1)
    for weight, rank in zip(weights, owner, strict=True):
        load[rank] += weight
    return load


def _overlaps(boxes: Sequence[Box], box: Box) -> list[tuple[int, Box]]:
    """Return the ranges of ``box`` in the boxes, each with the index of the box."""
    overlaps = ((index, other.overlap(box)) for index, other in enumerate(boxes))
    return [(index, common) for index, common in overlaps if common is not None]
