"""Sample index of Megatron's masked datasets (``build_mapping`` of ``core/datasets/helpers.cpp``).

Sentences of a document are taken until a sample has its target length: the full length, or with the
probability of short sequences a random one. A document's last sample takes all remaining sentences,
and two at least remain for it. Samples of all epochs are shuffled once. S: sentences, D: documents.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
import numpy.typing as npt

from megatron_lightning.data.masked.mersenne import mt19937, mt19937_64

LONG_SENTENCE = 512
"""Tokens of a sentence above which a document of several sentences is left out, as in Megatron."""
_DOCUMENTS = 1 << 14  # of a block


@dataclass(frozen=True)
class SentenceRules:
    """Division of documents into samples."""

    max_length: int
    """Tokens of a sample, without special tokens."""
    short_probability: float
    """Probability of a shorter target length."""
    min_sentences: int
    """Sentences of a sample at least."""

    def usable(
        self, boundaries: npt.NDArray[np.int64], lengths: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.bool_]:
        """Return which documents give samples [D].

        Args:
            boundaries: First sentence of each document, and the end of the last [D + 1].
            lengths: Tokens of each sentence of the file.
        """
        first = int(boundaries[0])
        longs = np.flatnonzero(lengths[first : boundaries[-1]] > LONG_SENTENCE) + first
        counts = np.diff(boundaries)
        has_long = np.diff(np.searchsorted(longs, boundaries)) > 0
        return (counts >= self.min_sentences) & ~(has_long & (counts > 1))


def sample_rows(
    boundaries: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
    rules: SentenceRules,
    num_samples: int | None,
    seed: int,
) -> npt.NDArray[np.uint32 | np.uint64]:
    """Return first sentence, end, and target length of each sample [n, 3], shuffled.

    Args:
        boundaries: First sentence of each document, and the end of the last [D + 1]. A document
            at least must be usable.
        lengths: Tokens of each sentence of the file.
        rules: Division of documents into samples.
        num_samples: Number of samples at least, over as many epochs as needed. None: one epoch.
        seed: Seed of the target lengths and of the order.
    """
    rows = array("I" if len(lengths) < 2**32 else "Q")
    targets = _target_lengths(rules, seed)
    is_complete = False
    while not is_complete:
        for begin in range(0, len(boundaries) - 1, _DOCUMENTS):
            block = boundaries[begin : begin + _DOCUMENTS + 1]
            _append_rows(rows, block, lengths, rules, targets)
        is_complete = num_samples is None or len(rows) >= 3 * num_samples
    samples = np.frombuffer(rows, np.dtype(f"u{rows.itemsize}")).reshape(-1, 3)
    return samples[_order(len(samples), seed + 1)]


def _target_lengths(rules: SentenceRules, seed: int) -> Iterator[int]:
    """Return the target lengths in the order of drawing."""
    longest = rules.max_length
    if rules.short_probability == 0:
        return repeat(longest)
    # C's round, half away from zero
    ratio = int(min(np.floor(1.0 / rules.short_probability + 0.5), 2**31 - 1))
    blocks = (
        np.where(drawn % ratio == 0, 2 + drawn % (longest - 1), longest).tolist()
        for drawn in mt19937(seed)
    )
    return chain.from_iterable(blocks)


def _append_rows(
    rows: array[int],
    boundaries: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
    rules: SentenceRules,
    targets: Iterator[int],
) -> None:
    """Append the samples of one epoch over documents. Each document and each sample draws a target
    length: the draw behind a document's last sample is unused.
    """
    first, last = int(boundaries[0]), int(boundaries[-1])
    # Tokens before each sentence of the block. A list, for bisection.
    sums = np.concatenate([[0], np.cumsum(lengths[first:last], dtype=np.int64)])
    full_stops = (np.searchsorted(sums, sums[:-1] + rules.max_length, side="left") + first).tolist()
    tokens_before = sums.tolist()
    usable = rules.usable(boundaries, lengths)
    for begin, end in zip(
        boundaries[:-1][usable].tolist(), boundaries[1:][usable].tolist(), strict=True
    ):
        start, target = begin, next(targets)
        while start < end:
            if target == rules.max_length:
                stop = full_stops[start - first]
            else:
                stop = bisect_left(tokens_before, tokens_before[start - first] + target) + first
            # BERT needs two segments, so that a sample has at least min_sentences, and a single
            # last sentence joins the sample before.
            stop = max(stop, start + rules.min_sentences)
            stop = stop if stop <= end - 2 else end
            rows.extend((start, stop, target))
            start, target = stop, next(targets)


def _order(size: int, seed: int) -> npt.NDArray[np.uint64]:
    """Return the order of rows after the shuffle of C++ with ``mt19937_64(seed)``."""
    order = array("Q", range(size))
    high = size - 1
    for drawn in mt19937_64(seed):
        if high <= 0:
            break
        places = np.arange(high, max(0, high - len(drawn)), -1, dtype=np.uint64)
        partners = (drawn[: len(places)] % (places + np.uint64(1))).tolist()
        for place, partner in zip(range(high, 0, -1), partners, strict=False):
            order[place], order[partner] = order[partner], order[place]
        high -= len(places)
    return np.frombuffer(order, np.uint64)
