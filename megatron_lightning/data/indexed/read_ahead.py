"""Fetches of the next samples in the background, for data at a URL."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megatron_lightning.data.indexed.indexed_files import IndexedDataset
from megatron_lightning.data.indexed.remote import is_remote

_AHEAD = 64  # samples
Part = tuple[int, int, int | None]
"""Sequence, first token and number of tokens. None: to the end of the sequence."""


class ReadAhead:
    """Fetches the samples behind a read sample, also samples of the other ranks of the node. Files
    of this machine need nothing.

    Args:
        indexed: The data.
    """

    def __init__(self, indexed: IndexedDataset) -> None:
        self._indexed = indexed
        self._fetched = 0
        self._is_remote = is_remote(indexed.prefix)

    def __call__(
        self, index: int, num_samples: int, parts: Callable[[int], Iterable[Part]]
    ) -> None:
        """Fetch the samples behind sample ``index``.

        Args:
            index: The read sample.
            num_samples: Number of samples.
            parts: Parts of a sample.
        """
        if not self._is_remote:
            return
        end = min(index + 1 + _AHEAD, num_samples)
        samples = range(max(self._fetched, index + 1), end)
        self._fetched = max(self._fetched, end)
        self._indexed.ahead([part for sample in samples for part in parts(sample)])
