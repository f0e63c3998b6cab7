"""Documents in rows of a fixed length, several in each.

Best-fit decreasing (Johnson 1973): documents in the order of falling length, each into the row with
the least sufficient room. All documents of one length and all rows of one room are a single step of
NumPy. So the number of steps depends on the different lengths, not on the number of documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_lightning.errors import DataError

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """The documents of each row, in order."""

    documents: Numbers
    """Documents of all rows, row after row [D]."""
    bounds: Numbers
    """Start of each row in ``documents``, and the end [R + 1]."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, row: int) -> tuple[int, ...]:
        """Return the documents of a row."""
        return tuple(self.documents[self.bounds[row] : self.bounds[row + 1]].tolist())

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return (self[row] for row in range(len(self)))

    @classmethod
    def of(cls, row_of: Numbers, num_rows: int) -> Rows:
        """Return rows from the row numbers [D] of documents 0, 1, …. A row keeps this order."""
        counts = np.bincount(row_of, minlength=num_rows)
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return cls(np.argsort(row_of, kind="stable").astype(np.int64), bounds)

    def shuffled(self, random: np.random.RandomState | np.random.Generator) -> Rows:
        """Return the same rows in another order."""
        order = random.permutation(len(self))
        counts = np.diff(self.bounds)[order]
        starts = self.bounds[:-1][order]
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        within = np.arange(bounds[-1]) - np.repeat(bounds[:-1], counts)
        return Rows(self.documents[np.repeat(starts, counts) + within], bounds)


def pack(lengths: Numbers, capacity: int) -> Rows:
    """Return rows of at most ``capacity`` tokens with all documents.

    Args:
        lengths: Tokens of every document [D], from 1.
        capacity: Tokens of a row.

    Raises:
        DataError: If a document is longer than a row.
    """
    if len(lengths) and int(lengths.max()) > capacity:
        longest = int(lengths.argmax())
        raise DataError(
            f"document {longest} has {lengths[longest]} tokens and a row {capacity}; set "
            "sequence_length to more, or cut the documents"
        )
    row_of, num_rows = _best_fit_decreasing(lengths, capacity)
    return Rows.of(row_of, num_rows)


def pack_in_windows(lengths: Numbers, order: Numbers, capacity: int, window: int) -> Rows:
    """Return rows of documents near each other in ``order``: each ``window`` documents are packed
    separately. The rows of a window are sorted by their first documents.

    Args:
        lengths: Tokens of every document.
        order: Documents in the order of an epoch [D]. A document may come several times.
        capacity: Tokens of a row.
        window: Documents packed together.
    """
    documents, bounds, num_done = [], [np.zeros(1, np.int64)], 0
    for begin in range(0, len(order), window):
        some = order[begin : begin + window]
        rows = pack(lengths[some], capacity)
        # In the window, in reading order.
        # Rows are sorted by their first documents, to stay near the order in which documents are
        # read.
        first = rows.documents[rows.bounds[:-1]]
        by_first = np.argsort(first, kind="stable")
        counts = np.diff(rows.bounds)[by_first]
        starts = rows.bounds[:-1][by_first]
        ends = np.cumsum(counts)
        within = np.arange(len(some)) - np.repeat(ends - counts, counts)
        documents.append(some[rows.documents[np.repeat(starts, counts) + within]])
        bounds.append(ends + num_done)
        num_done += len(some)
    return Rows(
        np.concatenate(documents) if documents else np.empty(0, np.int64), np.concatenate(bounds)
    )


def efficiency(lengths: Numbers, rows: Rows, capacity: int) -> float:
    """Return the fraction of the rows' positions filled by tokens."""
    filled = int(lengths[rows.documents].sum())
    return filled / (len(rows) * capacity) if len(rows) else 1.0


class _Room:
    """Rows by the remaining number of tokens."""

    def __init__(self, capacity: int) -> None:
        self._rows: list[list[Numbers]] = [[] for _ in range(capacity + 1)]
        self._counts = np.zeros(capacity + 1, np.int64)

    def add(self, room: int, rows: Numbers) -> None:
        if room and len(rows):
            self._rows[room].append(rows)
            self._counts[room] += len(rows)

    def take(self, room: int) -> Numbers:
        rows = np.concatenate(self._rows[room])
        self._rows[room], self._counts[room] = [], 0
        return rows

    def enough_for(self, length: int) -> list[int]:
        """Return the rooms of existing rows large enough for a document, the least first."""
        sizes: list[int] = (length + np.flatnonzero(self._counts[length:])).tolist()
        return sizes


def _best_fit_decreasing(lengths: Numbers, capacity: int) -> tuple[Numbers, int]:
    """Return the row of every document [D], and the number of rows.

    Best fit gives documents of length l to the fullest row until the row's room is below l (r // l
    documents for a room of r), and then to the next row.
    """
    order = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    room = _Room(capacity)
    row_of, num_done, total = np.empty(len(lengths), np.int64), 0, 0
    # All documents of one length at once, longest first: the number of steps follows the distinct
    # lengths, and not the documents.
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        placed: list[Numbers] = []
        remaining = count
        for size in room.enough_for(length):
            if not remaining:
                break
            rows = room.take(size)
            num_placed = _fill(room, rows, size, length, remaining)
            room.add(size, rows[len(num_placed) :])
            placed.append(np.repeat(rows[: len(num_placed)], num_placed))
            remaining -= int(num_placed.sum())
        new_rows = np.arange(total, total + -(-remaining // (capacity // length)))
        num_placed = _fill(room, new_rows, capacity, length, remaining)
        placed.append(np.repeat(new_rows, num_placed))
        total += len(new_rows)
        row_of[order[num_done : num_done + count]] = np.concatenate(placed)
        num_done += count
    return row_of, total


def _fill(room: _Room, rows: Numbers, size: int, length: int, remaining: int) -> Numbers:
    """Put up to ``remaining`` documents of a length into rows with room for ``size`` tokens, row
    after row. Return the number of documents in each used row.
    """
    per_row = size // length
    num_used = min(len(rows), -(-remaining // per_row))
    num_documents = np.minimum(per_row, remaining - per_row * np.arange(num_used))
    is_full = num_documents == per_row
    room.add(size - per_row * length, rows[:num_used][is_full])
    if num_used and not is_full[-1]:
        room.add(size - int(num_documents[-1]) * length, rows[num_used - 1 : num_used])
    return num_documents
