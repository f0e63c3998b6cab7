"""Deal the chunks of sequences to context-parallel ranks.

A causal query late in a document sees more keys than an early query. A row of one document is cut
into 2c chunks for c ranks, and rank r holds chunks r and 2c-1-r (*zigzag*, as
``get_batch_on_this_cp_rank`` of Megatron-LM does): all ranks do the same work. A packed row is cut
into more chunks, which are dealt by their work, the heaviest first, to the lightest rank with room.
Every rank holds the same number of tokens either way. Every rank knows the documents of full rows,
so all deal alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol


@dataclass(frozen=True)
class Deal:
    """Chunks of equal lengths, in the order of the sequence, and the ranks that hold them."""

    owners: tuple[int, ...]
    """Rank of every chunk."""

    @classmethod
    def zigzag(cls, num_ranks: int) -> Deal:
        """Return the deal of rows with one document."""
        return cls((*range(num_ranks), *reversed(range(num_ranks))))

    @classmethod
    def by_work(cls, work: Sequence[int], num_ranks: int) -> Deal:
        """Return a deal of chunks with the given work, as many to each of ``num_ranks`` ranks."""
        room, totals = [len(work) // num_ranks] * num_ranks, [0] * num_ranks
        owners = [0] * len(work)
        for chunk in sorted(range(len(work)), key=lambda chunk: -work[chunk]):
            free = (rank for rank in range(num_ranks) if room[rank])
            lightest = min(free, key=totals.__getitem__)
            owners[chunk] = lightest
            totals[lightest] += work[chunk]
            room[lightest] -= 1
        return cls(tuple(owners))

    def busiest(self, work: Sequence[int]) -> float:
        """Return the work of the busiest rank, of the mean, by the work of the chunks."""
        ranks = [sum(work[chunk] for chunk in self.chunks(r)) for r in sorted(set(self.owners))]
        return max(ranks) * len(ranks) / sum(ranks)

    @property
    def chunks_per_rank(self) -> int:
        """Chunks that each rank holds."""
        return self.owners.count(0)

    def chunks(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of a rank's chunks, in order."""
        return tuple(chunk for chunk, owner in enumerate(self.owners) if owner == rank)


class DealTaker(Protocol):
    """Holds tokens of a rank, and learns outside of its calls which ones."""

    deal: Deal | None
    """Chunks of the micro-batch at hand, which a step sets around each forward and backward. None:
    zigzag."""


_NUMBERS = (8, 16, 32)
_LEAST_TOKENS = 64
"""Of a chunk that is one of many: shorter ones cost more calls of kernels than they balance."""
_BALANCED = 1.05
"""Work of the busiest rank, of the mean, which more chunks would cost more than they balance."""


def chunk_numbers(length: int, num_ranks: int) -> list[int]:
    """Return the numbers of chunks that a rank may hold of a packed row of ``length`` tokens: one
    up to 8, and up to 16 and 32 for rows of many documents.
    """
    return [*dict.fromkeys(_fitting(length, num_ranks, most) for most in _NUMBERS)]


def _fitting(length: int, num_ranks: int, most: int) -> int:
    room = min(most, length // (_LEAST_TOKENS * num_ranks))
    return next((n for n in range(room, 2, -1) if length % (n * num_ranks) == 0), 2)


def balanced_deal(rows: Sequence[Sequence[int]], num_ranks: int, numbers: Sequence[int]) -> Deal:
    """Return the deal with the first of ``numbers`` chunks a rank that balances the work of
    attention, or the most balanced one.

    Args:
        rows: Boundaries of the documents of every row, see :func:`chunk_work`.
        num_ranks: Ranks.
        numbers: Chunks a rank, the fewest first.
    """
    deals: list[tuple[float, Deal]] = []
    for number in numbers:
        work = chunk_work(rows, num_ranks * number)
        deal = Deal.by_work(work, num_ranks)
        deals.append((deal.busiest(work), deal))
        if deals[-1][0] <= _BALANCED:
            break
    return min(deals, key=lambda one: one[0])[1]


def chunk_work(rows: Sequence[Sequence[int]], num_chunks: int) -> list[int]:
    """Return the pairs of a query and a visible key in full causal attention, by the chunk of the
    query, summed over the rows.

    Args:
        rows: Boundaries of the documents of every row: 0, the end of every document, s.
        num_chunks: Chunks of a row, a divisor of s.
    """
    work = [0] * num_chunks
    size = rows[0][-1] // num_chunks
    for boundaries in rows:
        for start, stop in pairwise(boundaries):
            for chunk in range(start // size, (stop - 1) // size + 1):
                first = max(start, chunk * size) - start
                last = min(stop, (chunk + 1) * size) - start
                work[chunk] += (last * (last + 1) - first * (first + 1)) // 2
    return work
