"""Storage of requests' keys: slots for each request, as a run of neighbors or as pages.

A *run* is reserved once, for the longest possible text of a request: attention reads a slice,
without a gather, and no request ever gives way. *Pages* are reserved as a text grows, and given
back when memory is short. GPUs hold more requests with pages, and GPU kernels read pages.

Layers that carry a state have a row for each request. The state of a shorter text is not kept: a
request shares the state of another request only while that request is at the last shared token.

Slot 0 belongs to no request. Every rank runs the same allocator on the same requests.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_lightning.layers.state.key_cache import Slots


class Copies(NamedTuple):
    """Copies made by a step before anything is read."""

    slots: tuple[tuple[slice, slice], ...] = ()
    """Slots to copy to other slots."""
    rows: tuple[tuple[int, int], ...] = ()
    """Rows of states to copy to other rows."""

    def and_(self, further: Copies) -> Copies:
        """Return these copies, and further copies behind."""
        return Copies(self.slots + further.slots, self.rows + further.rows)


NOTHING = Copies()


class Beginning(NamedTuple):
    """First tokens of a text whose keys another text has."""

    source: Hashable
    """The other text."""
    length: int
    """Number of tokens."""


class Allocator(Protocol):
    """Slots of requests. A request is any hashable object."""

    capacity: int
    """Tokens of the longest text without other texts."""
    has_states: bool
    """Whether layers carry states."""

    def reserve(
        self, request: Hashable, now: int, at_most: int, beginning: Beginning | None = None
    ) -> bool:
        """Reserve slots for ``now`` tokens of a text growing to ``at_most``. Return whether there
        were enough slots.

        A request without slots can have first tokens, less than ``now``, from another text. If
        layers carry states, that text has no further token yet. :meth:`copies` completes them.
        """
        ...

    def copies(self, request: Hashable, beginning: Beginning) -> Copies:
        """Return the copies to make before the keys of the beginning are read."""
        ...

    def missing(
        self, request: Hashable, now: int, at_most: int, beginning: Beginning | None = None
    ) -> int:
        """Return the size of what :meth:`reserve` takes: neighboring slots, or pages."""
        ...

    def largest(self, dropped: Iterable[Hashable] = ()) -> int:
        """Return the largest size that :meth:`reserve` could take without the texts ``dropped``."""
        ...

    def release(self, request: Hashable) -> None:
        """Give the slots of a request back."""
        ...

    def hand_over(self, request: Hashable, heir: Hashable, length: int) -> None:
        """Give the slots of a request's first ``length`` tokens to ``heir``, and the others back.
        The heir has no states.
        """
        ...

    def slots(self, request: Hashable, first: int, end: int) -> Tensor:
        """Return the slots of tokens ``first`` to ``end`` - 1."""
        ...

    def keys(self, request: Hashable, length: int) -> Slots:
        """Return the slots of the first ``length`` tokens, for reading."""
        ...

    def row(self, request: Hashable) -> int:
        """Return the row of a request's states, different for all requests with slots."""
        ...


class StateRows:
    """Rows of requests, the lowest free row first."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, int] = {}
        self._free: list[int] = []

    def take(self, request: Hashable) -> None:
        """Give a request a row, unless the request has one."""
        if request not in self._rows:
            self._rows[request] = heappop(self._free) if self._free else len(self._rows)

    def release(self, request: Hashable) -> None:
        """Take the row of a request back."""
        if request in self._rows:
            heappush(self._free, self._rows.pop(request))

    def __getitem__(self, request: Hashable) -> int:
        return self._rows[request]


class Runs:
    """A run of neighboring slots for each request, in the first gap of sufficient length.

    Args:
        num_slots: All slots, slot 0 included.
        has_states: Whether layers carry states.
    """

    def __init__(self, num_slots: int, *, has_states: bool = False) -> None:
        self.capacity = num_slots - 1
        self.has_states = has_states
        self._rows = StateRows()
        self._gaps = [(1, num_slots)]
        self._runs: dict[Hashable, tuple[int, int]] = {}

    def reserve(
        self, request: Hashable, now: int, at_most: int, beginning: Beginning | None = None
    ) -> bool:
        """See :class:`Allocator`. The beginning needs slots, too: runs have no slot in common."""
        if request in self._runs:
            return True
        for index, (start, end) in enumerate(self._gaps):
            if end - start >= at_most:
                free_run = (start + at_most, end)
                self._gaps[index : index + 1] = [free_run] if free_run[0] < end else []
                self._runs[request] = start, start + at_most
                self._rows.take(request)
                return True
        return False

    def copies(self, request: Hashable, beginning: Beginning) -> Copies:
        """See :class:`Allocator`."""
        source, length = beginning
        starts = (self._runs[source][0], self._runs[request][0])
        source_slots, own_slots = (slice(start, start + length) for start in starts)
        return Copies(((source_slots, own_slots),), _rows_to_copy(self, source, request))

    def missing(
        self, request: Hashable, now: int, at_most: int, beginning: Beginning | None = None
    ) -> int:
        """See :class:`Allocator`."""
        return 0 if request in self._runs else at_most

    def largest(self, dropped: Iterable[Hashable] = ()) -> int:
        """See :class:`Allocator`."""
        gaps = _merged([*self._gaps, *(self._runs[text] for text in dropped)])
        return max((end - start for start, end in gaps), default=0)

    def release(self, request: Hashable) -> None:
        """See :class:`Allocator`."""
        if request not in self._runs:
            return
        self._rows.release(request)
        self._free(*self._runs.pop(request))

    def hand_over(self, request: Hashable, heir: Hashable, length: int) -> None:
        """See :class:`Allocator`."""
        self._rows.release(request)
        start, end = self._runs.pop(request)
        self._runs[heir] = start, start + length
        if start + length < end:
            self._free(start + length, end)

    def _free(self, first: int, last: int) -> None:
        """Add a gap, merged with its neighbors."""
        self._gaps = _merged([*self._gaps, (first, last)])

    def slots(self, request: Hashable, first: int, end: int) -> Tensor:
        """See :class:`Allocator`."""
        start = self._runs[request][0]
        return torch.arange(start + first, start + end)

    def keys(self, request: Hashable, length: int) -> Slots:
        """See :class:`Allocator`."""
        start = self._runs[request][0]
        return slice(start, start + length)

    def row(self, request: Hashable) -> int:
        """See :class:`Allocator`."""
        return self._rows[request]


class Pages:
    """Pages of ``block_size`` slots, in any order. Page 0 belongs to no request.

    Args:
        num_slots: All slots, page 0 included. A remainder below a page is unused.
        block_size: Slots of a page.
        has_states: Whether layers carry states.
    """

    def __init__(self, num_slots: int, block_size: int, *, has_states: bool = False) -> None:
        self.has_states = has_states
        self._rows = StateRows()
        num_pages = num_slots // block_size
        self.block_size = block_size
        self.capacity = (num_pages - 1) * block_size
        self._free = deque(range(1, num_pages))
        self._users = [0] * num_pages
        self._pages: dict[Hashable, list[int]] = {}

    def reserve(
        self, request: Hashable, now: int, at_most: int, beginning: Beginning | None = None
    ) -> bool:
        """See :class:`Allocator`. Full pages of the beginning are shared."""
        num_missing = self.missing(request, now, at_most, beginning)
        if num_missing > len(self._free):
            return False
        pages = self._pages.setdefault(request, [])
        if beginning is not None:
            pages += self._pages[beginning.source][: beginning.length // self.block_size]
        new_pages = [self._free.popleft() for _ in range(num_missing)]
        pages += new_pages
        for page in pages if beginning is not None else new_pages:
            self._users[page] += 1
        self._rows.take(request)
        return True

    def copies(self, request: Hashable, beginning: Beginning) -> Copies:
        """See :class:`Allocator`. The tokens behind the full pages are copied."""
        num_shared, rest = divmod(beginning.length, self.block_size)
        slots: tuple[tuple[slice, slice], ...] = ()
        if rest:
            pages = (self._pages[text][num_shared] for text in (beginning.source, request))
            here, there = (slice(p * self.block_size, p * self.block_size + rest) for p in pages)
            slots = ((here, there),)
        return Copies(slots, _rows_to_copy(self, beginning.source, request))

    def missing(
        self, request: Hashable, now: int, at_most: int, beginning: Beginning | None = None
    ) -> int:
        """See :class:`Allocator`."""
        num_present = len(self._pages.get(request, ()))
        if beginning is not None:
            num_present += beginning.length // self.block_size
        return max(0, -(-now // self.block_size) - num_present)

    def largest(self, dropped: Iterable[Hashable] = ()) -> int:
        """See :class:`Allocator`."""
        uses = Counter(page for text in dropped for page in self._pages[text])
        return len(self._free) + sum(self._users[page] == count for page, count in uses.items())

    def release(self, request: Hashable) -> None:
        """See :class:`Allocator`."""
        self._rows.release(request)
        self._leave(self._pages.pop(request, []))

    def hand_over(self, request: Hashable, heir: Hashable, length: int) -> None:
        """See :class:`Allocator`."""
        self._rows.release(request)
        pages, count = self._pages.pop(request), -(-length // self.block_size)
        self._pages[heir] = pages[:count]
        self._leave(pages[count:])

    def _leave(self, pages: Iterable[int]) -> None:
        """Free the pages without further users."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

    def pages(self, request: Hashable) -> list[int]:
        """Return the pages of a request, in order."""
        return self._pages[request]

    def slots(self, request: Hashable, first: int, end: int) -> Tensor:
        """See :class:`Allocator`."""
        places = torch.arange(first, end)
        pages = torch.tensor(self._pages[request])[places // self.block_size]
        return pages * self.block_size + places % self.block_size

    def keys(self, request: Hashable, length: int) -> Slots:
        """See :class:`Allocator`."""
        return self.slots(request, 0, length)

    def row(self, request: Hashable) -> int:
        """See :class:`Allocator`."""
        return self._rows[request]


def _merged(gaps: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the gaps in order, neighbors as one."""
    merged = list[tuple[int, int]]()
    for start, end in sorted(gaps):
        if merged and start == merged[-1][1]:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((start, end))
    return merged


def _rows_to_copy(
    allocator: Allocator, source: Hashable, target: Hashable
) -> tuple[tuple[int, int], ...]:
    """Return the rows of the states that ``target`` takes from ``source``."""
    return ((allocator.row(source), allocator.row(target)),) if allocator.has_states else ()
