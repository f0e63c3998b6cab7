"""Lengths of documents as bars of text."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_lightning.data.indexed.indexed_files import IndexedDataset

_BARS = 16
_WIDTH = 48
_EIGHTHS = " ▏▎▍▌▋▊▉"
_MOST_SHOWN = 0.99  # of the documents, by length
_BLOCK = 1 << 20  # documents

Counts = npt.NDArray[np.int64]


class Bar(NamedTuple):
    """A row of a histogram."""

    label: str
    """Range of lengths."""
    bar: str
    num_documents: int
    """Number of documents."""


class Histogram(NamedTuple):
    """Numbers of documents by length."""

    bars: list[Bar]
    note: str
    """Documents, tokens, and what the bars leave out."""

    def __str__(self) -> str:
        rows = [f"{one.label} {one.bar} {one.num_documents or ''}".rstrip() for one in self.bars]
        return "\n".join([*rows, self.note])


class Lengths:
    """Number of documents of each length. The memory depends on the number of different lengths,
    not on the number of documents.
    """

    def __init__(self) -> None:
        self._values: Counts = np.zeros(0, np.int64)
        self._counts: Counts = np.zeros(0, np.int64)

    @classmethod
    def of(cls, indexed: IndexedDataset) -> Lengths:
        """Return the lengths of the documents of an indexed data set."""
        found, bounds = cls(), indexed.document_indices
        for begin in range(0, indexed.num_documents, _BLOCK):
            places = bounds[begin : begin + _BLOCK + 1]
            lengths = indexed.sequence_lengths[places[0] : places[-1]]
            ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            found.add(np.diff(ends[places - places[0]]))
        return found

    def add(self, lengths: npt.NDArray[Any]) -> None:
        """Count the lengths of documents [n]."""
        values, counts = np.unique(lengths, return_counts=True)
        self._values, places = np.unique(
            np.concatenate([self._values, values]), return_inverse=True
        )
        both = np.concatenate([self._counts, counts])
        self._counts = np.bincount(places, both, len(self._values)).astype(np.int64)

    def quantile(self, fraction: float) -> int:
        """Return the length below or at which a fraction of the documents lies. 0 if there are
        none.
        """
        if not len(self._values):
            return 0
        ends = np.cumsum(self._counts)
        return int(self._values[np.searchsorted(ends, fraction * (ends[-1] - 1), side="right")])

    def histogram(self, longest: int | None = None) -> Histogram:
        """Return the number of documents of each length as bars.

        Args:
            longest: Longest documents with a bar, in tokens. None: without the longest hundredth.
        """
        longest = max(1, self.quantile(_MOST_SHOWN)) if longest is None else longest
        edges = np.unique(np.linspace(0, longest, _BARS + 1).astype(int))
        # The last bin of NumPy has both of its edges: longer documents are left out before.
        is_shown = self._values <= longest
        shown, weights = self._values[is_shown] - 1, self._counts[is_shown]
        counts, _ = np.histogram(shown, edges, weights=weights)
        most, digits, bars = max(1, int(counts.max())), len(str(longest)), []
        for number, count in enumerate(counts.astype(int).tolist()):
            cells, eighths = divmod(round(8 * _WIDTH * count / most), 8)
            bar = "█" * cells + (_EIGHTHS[eighths] if eighths else "")
            bar = bar or ("▏" if count else "")
            label = f"{edges[number] + 1:>{digits}} to {edges[number + 1]:>{digits}}"
            bars.append(Bar(label, bar, count))
        num_longer = int(self._counts[self._values > longest].sum())
        longer = f", {num_longer} longer than {longest}" if num_longer else ""
        num_tokens = int((self._counts * self._values).sum())
        note = (
            f"{int(self._counts.sum())} documents, {num_tokens} tokens, median "
            f"{self.quantile(0.5)}{longer}"
        )
        return Histogram(bars, note)
