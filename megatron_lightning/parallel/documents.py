"""Boundaries of the documents in the rows of a batch, on the host.

Attention needs the boundaries as numbers, not as a tensor on the device, since boundaries decide
which blocks of queries and keys are computed at all. The boundaries are read once for each call of
the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from megatron_lightning.parallel.deal import Deal, balanced_deal
from megatron_lightning.parallel.sequence import SequencePart


@dataclass(frozen=True)
class Documents:
    """Documents of full rows.

    A row's boundaries are the ``cu_seqlens`` of kernels: 0, the end of every document, s.
    """

    boundaries: tuple[tuple[int, ...], ...]
    """Boundaries of every row of the batch."""
    deal: Deal | None = None
    """Chunks of the ranks that share the rows. None: zigzag."""
    table: Tensor = field(init=False, repr=False, compare=False)
    """The boundaries as a tensor on the CPU [rows, most boundaries of a row], padded with the last
    boundary. The table is an input of compiled graphs, so that graphs are the same for all
    documents."""

    def __post_init__(self) -> None:
        most = max(map(len, self.boundaries))
        rows = [(*row, *row[-1:] * (most - len(row))) for row in self.boundaries]
        object.__setattr__(self, "table", torch.tensor(rows, device="cpu"))

    @classmethod
    def of_table(cls, table: Tensor, deal: Deal | None = None) -> Documents:
        """Return the documents of a :attr:`table`."""
        return cls(tuple(tuple(dict.fromkeys(row)) for row in table.tolist()), deal)

    @classmethod
    def of_ids(cls, document_ids: Tensor, deal: Deal | None = None) -> Documents:
        """Return the documents of full rows of ids [b, s]. A document ends where the id changes."""
        return cls._where(document_ids[:, 1:] != document_ids[:, :-1], deal)

    @classmethod
    def of_positions(cls, position_ids: Tensor, deal: Deal | None = None) -> Documents:
        """Return the documents of full rows of positions [b, s]. A document ends where positions do
        not go on by 1.
        """
        return cls._where(position_ids[:, 1:] != position_ids[:, :-1] + 1, deal)

    @classmethod
    def _where(cls, ends: Tensor, deal: Deal | None) -> Documents:
        """``ends`` [b, s-1]: whether a position is the end of the position's document."""
        length = ends.shape[1] + 1
        boundaries: list[list[int]] = [[0] for _ in range(ends.shape[0])]
        for row, position in ends.nonzero().tolist():
            boundaries[row].append(position + 1)
        return cls(tuple((*row, length) for row in boundaries), deal)

    @property
    def length(self) -> int:
        """Positions of a row."""
        return self.boundaries[0][-1]

    @property
    def are_full_rows(self) -> bool:
        """Whether every row is a single document."""
        return all(len(row) == 2 for row in self.boundaries)

    def expanded(self, num_rows: int) -> Documents:
        """Return the documents of ``num_rows`` rows. A single row represents all rows."""
        many = len(self.boundaries) > 1
        return self if many else Documents(self.boundaries * num_rows, self.deal)

    def dealt(self, num_ranks: int, numbers: Sequence[int]) -> Deal:
        """Return a deal by the work of full causal attention, which decides: windows and states
        cost less.

        Args:
            num_ranks: Ranks.
            numbers: Chunks a rank. The first number that balances the ranks is taken.
        """
        return balanced_deal(self.boundaries, num_ranks, numbers)

    def spans(self) -> Iterator[tuple[int, range]]:
        """Yield the row and the positions of every document."""
        for row, boundaries in enumerate(self.boundaries):
            for start, stop in pairwise(boundaries):
                yield row, range(start, stop)

    def positions(
        self, part: SequencePart | None = None, device: torch.device | None = None
    ) -> Tensor:
        """Return the positions within their documents [b, s], or only the positions in ``part``."""
        part = part or SequencePart()
        return part.split(torch.stack([_restarting(row) for row in self.boundaries]), 1).to(device)

    def lengths(
        self, part: SequencePart | None = None, device: torch.device | None = None
    ) -> Tensor:
        """Return the lengths of the positions' documents [b, s], or only for the positions in
        ``part``.
        """
        part = part or SequencePart()
        rows = [
            torch.cat([torch.full((stop - start,), stop - start) for start, stop in pairwise(row)])
            for row in self.boundaries
        ]
        return part.split(torch.stack(rows), 1).to(device)

    def ends(self, part: SequencePart | None = None, device: torch.device | None = None) -> Tensor:
        """Return whether a position is the last of the position's document [b, s], or only for the
        positions in ``part``.
        """
        part = part or SequencePart()
        last = torch.zeros(len(self.boundaries), self.length, dtype=torch.bool)
        for row, boundaries in enumerate(self.boundaries):
            last[row, [end - 1 for end in boundaries[1:]]] = True
        return part.split(last, 1).to(device)


def _restarting(boundaries: Sequence[int]) -> Tensor:
    return torch.cat([torch.arange(stop - start) for start, stop in pairwise(boundaries)])


def row_lengths(position_ids: Tensor, padding: Tensor | None) -> Tensor:
    """Return the number of positions [b or 1, 1] up to each row's largest one, without padding.

    Args:
        position_ids: [b or 1, s] of full rows.
        padding: [b, s] whether a token is padding. None: no token is.
    """
    ends = position_ids + 1
    if padding is not None:
        ends = ends.masked_fill(padding, 0)
    return ends.amax(1, keepdim=True)
