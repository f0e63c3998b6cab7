"""Storage of requests' keys: slots for each request, as a run of neighbors or as pages.

A *run* is reserved once, for the longest possible text of a request: attention reads a slice,
without a gather, and no request ever gives way. *Pages* are reserved as a text grows, and given
back when memory is short. GPUs hold more requests with pages, and GPU kernels read pages.

Layers that carry a state have a row for each request. The state of a shorter text is not kept: a
request shares the state of another request only while that request is at the last shared token.

Slot 0 belongs to no request. Every rank runs the same allocator on the same requests.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
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


class Allocator(Protocol):
    """Slots of requests. A request is any hashable object."""

    capacity: int
    """Tokens of the longest text without other texts."""
    has_states: bool
    """Whether layers carry states."""

    def reserve(self, request: Hashable, now: int, at_most: int) -> bool:
        """Reserve slots for ``now`` tokens of a text growing to ``at_most``. Return whether there
        were enough slots.
        """
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

    def share(self, source: Hashable, target: Hashable, length: int) -> tuple[int, Copies]:
        """Give a request without slots, or with unused slots, the first ``length`` tokens of
        another request. If layers carry states, the other request has no further token yet.

        Returns:
            Number of tokens in ``target``, and the copies to make before reading the tokens.
        """
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

    def reserve(self, request: Hashable, now: int, at_most: int) -> bool:
        """See :class:`Allocator`."""
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
        insort(self._gaps, (first, last))
        merged = self._gaps[:1]
        for start, end in self._gaps[1:]:
            if start == merged[-1][1]:
                merged[-1] = merged[-1][0], end
            else:
                merged.append((start, end))
        self._gaps = merged

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

    def share(self, source: Hashable, target: Hashable, length: int) -> tuple[int, Copies]:
        """Copy: runs have no slot in common."""
        runs = (self._runs[source][0], self._runs[target][0])
        source_slots, target_slots = (slice(start, start + length) for start in runs)
        slots = ((source_slots, target_slots),) if length else ()
        return length, Copies(slots, _rows_to_copy(self, source, target))


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

    def reserve(self, request: Hashable, now: int, at_most: int) -> bool:
        """See :class:`Allocator`."""
        pages = self._pages.get(request, [])
        num_missing = -(-now // self.block_size) - len(pages)
        if num_missing > len(self._free):
            return False
        for _ in range(num_missing):
            pages.append(self._free.popleft())
            self._users[pages[-1]] = 1
        self._pages[request] = pages
        self._rows.take(request)
        return True

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

    def share(self, source: Hashable, target: Hashable, length: int) -> tuple[int, Copies]:
        """Share the full pages, and copy the tokens behind the full pages."""
        num_shared = length // self.block_size
        shared_pages = self._pages[source][:num_shared]
        own_pages = self._pages[target]
        for page, replaced in zip(shared_pages, own_pages, strict=False):
            self._users[page] += 1
            self._users[replaced] = 0
            self._free.append(replaced)
        own_pages[:num_shared] = shared_pages
        rest = length % self.block_size
        slots: tuple[tuple[slice, slice], ...] = ()
        if rest:
            pages = (self._pages[source][num_shared], own_pages[num_shared])
            here, there = (slice(p * self.block_size, p * self.block_size + rest) for p in pages)
            slots = ((here, there),)
        return length, Copies(slots, _rows_to_copy(self, source, target))


def _rows_to_copy(
    allocator: Allocator, source: Hashable, target: Hashable
) -> tuple[tuple[int, int], ...]:
    """Return the rows of the states that ``target`` takes from ``source``."""
    return ((allocator.row(source), allocator.row(target)),) if allocator.has_states else ()
