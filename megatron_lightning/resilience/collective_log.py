"""Calls that all ranks of a group make in the same order, recorded on each rank, and the comparison
of two ranks' records.

Recording is local. The records of two ranks differ only if a rank has made a call without the other
rank, or has left a loop earlier: one of the ranks then waits forever. A slow rank has a shorter
record, not a different one.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_NUM_MARKS = 64  # kept of each rank
_BROADCASTS = frozenset(("broadcast", "broadcast_object_list"))


@dataclass(frozen=True)
class Mark:
    """A call that all ranks of a group make in the same order."""

    what: str
    """The call, as a user knows it."""
    ranks: tuple[int, ...]
    """Ranks of the group. Empty: all ranks."""
    number: int
    """Number of the call among the calls of this group."""
    num_of_all: int
    """Calls of all ranks before this call."""


@dataclass(frozen=True)
class Record:
    """The record of a rank, as published."""

    rank: int
    marks: tuple[Mark, ...]
    """The last calls."""
    num_calls: int
    """All calls so far."""
    waits_in: str = ""
    """Collective that the main thread is in. Empty: none, as far as the stack shows."""
    waits_for: tuple[int, ...] = ()
    """Ranks of the collective."""
    function: str = ""
    """Function of the collective."""
    where: str = ""
    """Innermost line of the user's code."""
    num_looks: int = 1
    """Looks that found the rank in the same call."""

    def last_of(self, ranks: tuple[int, ...]) -> int:
        """Return the number of the group's next call."""
        return max((mark.number + 1 for mark in self.marks if mark.ranks == ranks), default=0)

    def find(self, ranks: tuple[int, ...], number: int) -> Mark | None:
        """Return a call by its number in the group, if the call is among the last calls."""
        return next((m for m in self.marks if (m.ranks, m.number) == (ranks, number)), None)

    @property
    def num_of_all(self) -> int:
        """Calls of all ranks so far."""
        if not self.marks:
            return 0
        last = self.marks[-1]
        return last.num_of_all + (not last.ranks)

    def reaches_back_to(self, num_of_all: int) -> bool:
        """Whether the last calls include every call after the first ``num_of_all`` calls of all
        ranks.
        """
        if self.num_calls == len(self.marks):
            return True
        return self.find((), num_of_all - 1) is not None

    def is_at(self, mark: Mark) -> bool:
        """Whether the rank has made no call since ``mark``."""
        return self.marks[-1:] == (mark,)


@dataclass
class Course:
    """The record of this rank. Only the main thread records."""

    changed_at: float = field(default_factory=time.monotonic)
    """Monotonic time of the last call."""
    num_calls: int = 0
    """All calls so far."""
    has_ended: bool = False
    """Whether this rank has left the common order, by an exception."""
    _marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=_NUM_MARKS))
    _counts: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def mark(self, what: str, ranks: Sequence[int] = ()) -> None:
        """Record a call before the first collective of the call.

        Args:
            what: The call, in equal words on all ranks.
            ranks: Ranks of the group. Empty: all ranks.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        group = tuple(ranks)
        self._marks.append(Mark(what, group, self._counts[group], self._counts[()]))
        self._counts[group] += 1
        self.num_calls += 1
        self.changed_at = time.monotonic()

    def end(self) -> None:
        """Leave the common order."""
        self.has_ended = True

    def marks(self) -> tuple[Mark, ...]:
        """Return the last calls. Called from another thread."""
        while True:
            try:
                return tuple(self._marks)
            except RuntimeError:  # the main thread has recorded a call meanwhile
                continue


def apart(one: Record, other: Record) -> tuple[Mark, Mark] | None:
    """Return the first calls in which two ranks differ, each rank's own. None: the records agree,
    as far as both reach.
    """
    differences = [
        (mark, its)
        for mark in one.marks
        if (not mark.ranks or other.rank in mark.ranks)
        if (its := _instead(mark, other)) is not None
    ] + [
        (mark, its)
        for its in other.marks
        if its.ranks and one.rank in its.ranks
        if (mark := _instead(its, one)) is not None
    ]
    return min(differences, key=lambda pair: pair[0].num_of_all + pair[1].num_of_all, default=None)


def _instead(mark: Mark, other: Record) -> Mark | None:
    """Return the call of another rank in the place of ``mark``, if the call is another."""
    its = other.find(mark.ranks, mark.number)
    if its is not None:
        is_same = (its.what, its.num_of_all) == (mark.what, mark.num_of_all)
        return None if is_same else its
    if other.last_of(mark.ranks) > mark.number or not other.reaches_back_to(mark.num_of_all):
        return None  # made long ago
    # A call of all ranks that follows ``mark``.
    return other.find((), mark.num_of_all) if mark.ranks else None


def passed(waiting: Record, other: Record, records: Mapping[int, Record]) -> Mark | None:
    """Return the call of another rank that follows the collective in which ``waiting`` waits for
    that rank. None: a rank may still arrive.

    The source leaves a broadcast before the other ranks have come, and a late rank may pass the
    values on. All ranks of a broadcast have to wait, or to have passed.
    """
    if not waiting.waits_in or other.rank not in waiting.waits_for:
        return None
    if waiting.function in _BROADCASTS and any(
        rank not in records
        or not (records[rank].waits_in or records[rank].num_of_all > waiting.num_of_all)
        for rank in waiting.waits_for
    ):
        return None
    return other.find((), waiting.num_of_all)


def crosses(one: Record, other: Record, records: Mapping[int, Record]) -> bool:
    """Whether two ranks wait for each other in different collectives, while no rank of the
    collectives is late.
    """
    waited = {*one.waits_for, *other.waits_for}
    differ = (one.function, one.waits_for) != (other.function, other.waits_for)
    meet = other.rank in one.waits_for and one.rank in other.waits_for
    return differ and meet and all(r in records and records[r].waits_in for r in waited)
