"""Backward passes of the FSDP2 units: every rank reduces each unit once, in the same order.

Data may decide whether a parameter gets a gradient, and whether backward reaches a unit at all.
Data must not decide about collectives. So collectives follow from the order of the calls alone,
equal on all ranks (``unit_order``). With the units 0 to 3 called in this order, a backward pass
with gathers is, on every rank:

    backward reaches 3                gather 3, gather 2 ahead
    backward reaches 2    reduce 3              gather 1 ahead
    backward reaches 1    reduce 2              gather 0 ahead
    backward reaches 0    reduce 1
    backward ends         reduce 0

Autograd runs in reverse order: once backward has reached a unit, the gradients of later units are
complete. A unit not reached by backward is gathered and reduced anyway, between the neighboring
units.

A unit with several calls is gathered for the last call, because backward begins with the last call.
The unit stays gathered until the backward of the first call has ended. Then the unit is reduced,
once. The unit's gradients are complete when backward reaches a unit with all calls before the first
call. Called in the order 0, 1, 2, 1, 2, 3:

    backward reaches 3                  gather 3, gather 2 ahead
    backward reaches 2 (second call)    reduce 3
    backward reaches 1 (second call)    gather 1
    ... 2 and 1 (first calls)
    backward reaches 0                  reduce 2, reduce 1, gather 0

A unit inside of an outer unit (experts in a layer) is reached after the outer unit. Both are
complete at the same time:

    backward reaches 1            gather 1, gather the one inside ahead
    ... reaches the one inside    gather 0 ahead
    backward reaches 0            reduce 1 and the one inside, gather the one inside 0 ahead
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron_lightning.compat import at_end_of_backward


class StageBackward:
    """The backward passes of a stage's units."""

    def __init__(
        self,
        units: Mapping[int, Any],
        order: Callable[[], Sequence[int]],
        *,
        outer: Mapping[int, int],
        reshard: bool,
        every: bool,
    ) -> None:
        self._units = units
        self._order = order
        self._outer = outer  # unit -> the enclosing unit
        self._reshard = reshard
        self._every = every
        self.reduce: Callable[[int, bool], None] = lambda unit, last: None
        """Function to reduce a unit's gradients, called with the unit's index and whether the
        gradients are the last of the step."""
        # Units in the order of the ends of last calls -> units with the first call after.
        self._later: dict[int, list[int]] = {}
        self._ahead: dict[int, list[int]] = {}  # unit -> units that backward reaches earlier
        self._next: dict[int, int] = {}  # unit -> the unit to gather ahead
        self._last = self._running = False
        self._reached: set[int] = set()
        self._done: set[int] = set()

    @property
    def is_running(self) -> bool:
        """Whether a backward pass is under way. Forwards inside a backward pass are
        recomputations.
        """
        return self._running

    def reset(self) -> None:
        """Begin a step: the gradients of a backward pass are not the last of the step."""
        self._last = self._running = False

    def begin_last(self) -> None:
        """Begin to complete the gradients of a step."""
        self._last = True
        self._begin()

    def end_last(self) -> None:
        """Reduce the units not reduced by any backward pass, such as units with deferred weight
        gradients.
        """
        self._complete_all(dict.fromkeys([*self._later, *self._units]))
        self._last = False

    def reached(self, unit: int) -> None:
        """Handle a unit just reached by backward, before FSDP2 gathers the unit's parameters."""
        if not self._running:
            self._begin()
            self._running = True
            at_end_of_backward(self._end)
        for other_unit in self._ahead.get(unit, ()):
            self._pass(other_unit, is_gathered=True)
        self._arrive(unit)

    def _begin(self) -> None:
        if not self._later:
            self._learn(self._order())
        self._reached = set()
        self._done = set()

    def _learn(self, order: Sequence[int]) -> None:
        first = {unit: order.index(unit) for unit in dict.fromkeys(order)}
        last = {unit: place for place, unit in enumerate(order)}
        ends = self._ends(order)
        backward = list(dict.fromkeys(reversed(ends)))  # by the last calls
        self._later = {
            unit: [
                later_unit
                for later_unit in reversed(backward)
                if first[later_unit] > last[unit] and self._outer.get(later_unit) != unit
            ]
            for unit in reversed(backward)
        }
        self._ahead = {unit: backward[:place] for place, unit in enumerate(backward)}
        for unit, following in zip(backward, [*backward[1:], *backward[-1:]], strict=True):
            # FSDP2 would release and gather a unit, and the units ahead, for each of the unit's
            # calls.
            is_repeated = order.count(unit) > 1
            self._units[unit].set_reshard_after_backward(
                self._reshard and not is_repeated, recurse=False
            )
            # By default FSDP2 prefetches the previous unit of the forward. For the first unit, the
            # previous unit belongs to another micro-batch.
            self._next[unit] = unit if is_repeated else following
            self._units[unit].set_modules_to_backward_prefetch([self._units[self._next[unit]]])

    def _ends(self, order: Sequence[int]) -> list[int]:
        """Return the units in the order of the ends of calls, given the order of the begins."""
        ends: list[int] = []
        for unit in order:
            is_inside = bool(ends) and ends[-1] == self._outer.get(unit)
            ends.insert(len(ends) - is_inside, unit)
        return ends

    def _end(self) -> None:
        """Complete the first units, and the units not reached by the backward pass."""
        for unit in reversed(list(self._later)):
            self._pass(unit, is_gathered=self._has_backward(unit))
        self._complete_all(self._later)
        self._running = False

    def _has_backward(self, unit: int) -> bool:
        """Return whether the unit's output depends on trained parameters of the stage."""
        earlier_units = list(self._later)[
            : list(self._later).index(self._outer.get(unit, unit)) + 1
        ]
        return any(
            p.requires_grad
            for earlier_unit in earlier_units
            for p in self._units[earlier_unit].parameters()
        )

    def _pass(self, unit: int, *, is_gathered: bool) -> None:
        """Gather and reduce a unit not reached by this rank's backward, as ranks that reached the
        unit do.
        """
        if unit in self._reached or unit in self._done:
            return
        self._arrive(unit)
        if is_gathered and self._reshard:
            self._units[unit].unshard()
            self._units[self._next[unit]].unshard(async_op=True)

    def _arrive(self, unit: int) -> None:
        """Complete all units called only after ``unit``."""
        self._reached.add(unit)
        self._complete_all(self._later.get(unit, ()))

    def _complete_all(self, units: Iterable[int]) -> None:
        for unit in self._pending(units):
            self._complete(unit)

    def _complete(self, unit: int) -> None:
        self._done.add(unit)
        if self._last or self._reshard:
            self._units[unit].reshard()
        if self._last or self._every:
            self.reduce(unit, self._last)

    def _pending(self, units: Iterable[int]) -> list[int]:
        """Return the incomplete units of ``units``, the last first."""
        return [unit for unit in units if unit not in self._done][::-1]
