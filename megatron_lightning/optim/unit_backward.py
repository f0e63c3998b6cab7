"""The backward passes of the units that FSDP2 shards: one reduction of each unit, in one order, on every rank.

FSDP2 reduces the gradients that a unit happens to have when its backward ends, and a unit whose output does not reach the loss
has no backward. Where that depends on the data, ranks would reduce different tensors together. Here a parameter without a
gradient takes part with zeros, and before a unit's backward those after it that have had none are gathered and reduced in its
place, so that the collectives of a step follow from the order of the calls alone (``unit_order``). What is gathered ahead is
the unit before in that order; FSDP2 takes the one that ran before, at the first unit that of another micro-batch, in vain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import takewhile

from megatron_lightning.compat import FsdpUnit, at_end_of_backward, backward_pass


class StageBackward:
    """The backward passes of one stage's units; creating it changes what FSDP2 does around them.

    Args:
        units: The units.
        order: Returns the units, by index, in the order in which a training step calls them; nothing before the first.
    """

    def __init__(self, units: Sequence[FsdpUnit], order: Callable[[], Sequence[int]]) -> None:
        self._units, self._order = units, order
        self._parameters = [frozenset(id(sharded) for sharded, _ in unit.parameters()) for unit in units]
        self._trains = [any(whole.requires_grad for _, whole in unit.parameters()) for unit in units]
        self._calls: Counter[int] = Counter()
        self._behind: dict[int, list[int]] = {}  # unit -> those whose first call comes after its last one
        self._next: dict[int, int] = {}  # unit -> the one whose backward follows
        self._pass = -1
        self._begun: set[int] = set()
        self._ended: Counter[int] = Counter()
        self._reduced: set[int] = set()
        self.used: set[int] = set()
        """Ids of the sharded parameters that have had a gradient on this rank since this was last cleared."""
        for index, unit in enumerate(units):
            unit.wrap_backward(partial(self._before, index), partial(self._after, index))

    def begin(self) -> None:
        """From here on each unit is reduced once more: a backward pass begins, or what completes a step's gradients."""
        if not self._calls:
            self._learn(self._order())
        self._begun, self._ended, self._reduced = set(), Counter(), set()

    def _learn(self, order: Sequence[int]) -> None:
        self._calls = Counter(order)
        first = {unit: order.index(unit) for unit in self._calls}
        last = {unit: place for place, unit in enumerate(order)}
        self._behind = {unit: [other for other in first if first[other] > last[unit]] for unit in self._calls}
        self._next = {unit: order[place - 1] for unit, place in last.items() if place}

    def _enter(self) -> bool:
        """Return whether a backward pass runs."""
        current = backward_pass()
        if current not in (-1, self._pass):
            self._pass = current
            self.begin()
            at_end_of_backward(self._end)
        return current != -1

    def _end(self) -> None:
        """Do what the backward pass has left out of the first units."""
        for unit in self._pending(self._calls):
            self._make_up(unit, gather=self._trains[unit])

    def _before(self, index: int, gather: Callable[[], None]) -> None:
        self._enter()
        for unit in self._pending(self._behind.get(index, ())):
            self._make_up(unit, gather=True)
        self._begun.add(index)
        gather()
        if index in self._next:
            self._units[self._next[index]].gather_ahead()

    def _after(self, index: int, reduce: Callable[[], None]) -> None:
        running = self._enter()
        for other in self._pending(self._behind.get(index, ())):
            self._make_up(other, gather=running)
        self._ended[index] += 1
        if running and self._ended[index] < self._calls[index]:  # the first call's backward comes last, and reduces
            return
        unit = self._units[index]
        if unit.is_reducing and index not in self._reduced and index in self._calls:
            self.used |= self._parameters[index].difference(map(id, unit.fill_gradients()))
        self._reduced.add(index)
        reduce()

    def _pending(self, units: Iterable[int]) -> list[int]:
        """Return those of ``units`` whose backward has not ended, the last one first.

        Autograd runs what was computed last first: when it has come to a unit, or to the end, no gradient of those behind it
        can come any more.
        """
        return list(takewhile(lambda unit: unit not in self._reduced, units))[::-1]

    def _make_up(self, unit: int, *, gather: bool) -> None:
        """Do what the backward pass of a unit would have done, had it come to it."""
        if unit in self._reduced:
            return
        if gather and unit not in self._begun:
            self._units[unit].begin_backward()
        self._ended[unit] = self._calls[unit]
        self._units[unit].end_backward()
