"""Order of a weighted blend of data sets, equal to Megatron's ``build_blending_indices``.

Sample t comes from the data set d with the largest ``w_d max(t, 1) - c_d``, ties going to the first
data set. ``c_d`` counts the earlier samples of d. This rule is a loop over samples. Here many
stretches of samples are walked side by side from guessed counts. A stretch is right if the previous
stretch is right and ends with the counts guessed for this stretch. Wrong stretches are walked
again. So the result is exact by induction.

Products and differences are rounded separately on every processor. A compiler may fuse the two
operations, so Megatron's order differs between x86 and ARM. The order here is the order of x86. N:
data sets.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_lightning.errors import ConfigError

Index = npt.NDArray[np.int16]
_Floats = npt.NDArray[np.float64]
_LONGEST_STRETCH = 4096
_GUESSED_AHEAD = 128
_BLOCK, _SMALLEST_BLOCK = 4096, 512
MOST_DATASETS = 32766
"""Most data sets of a blend: the index has 16 bits, as Megatron's."""


def normalized(weights: Sequence[float]) -> _Floats:
    """Return weights [N] with a sum of 1.

    Raises:
        ConfigError: If a weight is not a finite number above 0.
    """
    values = np.asarray(weights, np.float64)
    if not np.isfinite(values).all() or (values <= 0).any():
        raise ConfigError(
            f"the weights of a blend are {list(weights)}: each must be a number above 0. Remove "
            "the data that have none."
        )
    if len(values) > MOST_DATASETS:
        raise ConfigError(
            f"a blend of {len(values)} data sets: {MOST_DATASETS} are the most. Merge some of them."
        )
    return np.asarray(values / values.sum(), np.float64)


def blend_index(weights: _Floats, size: int, *, num_stretches: int | None = None) -> Index:
    """Return the data set of every sample [size].

    Args:
        weights: Share of every data set [N], with a sum of 1.
        size: Number of samples.
        num_stretches: Stretches walked at once. The result does not depend on this number.
    """
    if num_stretches is None:  # the arrays of a walk fit a cache of a few MB
        num_stretches = int(np.clip((1 << 15) // len(weights), 256, 8192))
    index = np.empty(size, np.int16)
    counts, start = np.zeros(len(weights)), 0
    while start < size:
        length = max(1, min(_LONGEST_STRETCH, -(-(size - start) // num_stretches)))
        num = min(num_stretches, -(-(size - start) // length))
        picks, counts = _stretches(weights, counts, start, length, num)
        stop = min(size, start + length * num)
        index[start:stop], start = picks[: stop - start], stop
    return index


def exhaustive_index(sizes: Sequence[int]) -> Index:
    """Return for every sample of a blend the index of its data set, with all samples of every data
    set once. Equal to Megatron's ``build_exhaustive_blending_indices``.

    Args:
        sizes: Samples of every data set [N].
    """
    lengths = np.asarray(sizes, np.int64)
    total = int(lengths.sum())
    index = blend_index(lengths / float(total), total)
    spent = np.bincount(index, minlength=len(lengths))
    if (spent != lengths).any():  # by the rule a spent data set has a negative error
        raise AssertionError(f"blend of {lengths.tolist()} has given {spent.tolist()} samples")
    return index


def _stretches(
    weights: _Floats, known: _Floats, start: int, length: int, num: int
) -> tuple[Index, _Floats]:
    """Return the picks [num * length] of stretches from sample ``start`` on, and the counts after
    the stretches.

    Args:
        weights: Shares [N].
        known: Counts [N] before ``start``.
        start: First sample.
        length: Samples of a stretch.
        num: Stretches.
    """
    first = start + length * np.arange(num, dtype=np.float64)
    begin = _guessed_counts(weights, first)
    begin[0] = known
    ends, picks = begin.copy(), np.empty((length, num), np.int16)
    wrong_places = np.arange(num)
    while len(wrong_places):
        counts = begin[wrong_places]
        picks[:, wrong_places] = _walk(weights, counts, first[wrong_places], length)
        ends[wrong_places] = counts
        wrong_places = 1 + np.flatnonzero((ends[:-1] != begin[1:]).any(axis=1))
        begin[wrong_places] = ends[wrong_places - 1]
    return picks.T.reshape(-1), ends[-1].copy()


def _guessed_counts(weights: _Floats, first: _Floats) -> _Floats:
    """Return likely counts [stretches, N] before the samples ``first``: largest remainders of
    ``w t`` a few samples earlier, followed by the rule.
    """
    ahead = np.minimum(first, _GUESSED_AHEAD)
    quota = (first - ahead)[:, None] * weights
    counts = np.floor(quota)
    num_missing = (first - ahead - counts.sum(1)).astype(int)
    rank = np.argsort(np.argsort(counts - quota, axis=1, kind="stable"), axis=1)
    counts += rank < num_missing[:, None]
    _walk(weights, counts, first - ahead, _GUESSED_AHEAD, num_steps=ahead)
    return counts


def _walk(
    weights: _Floats,
    counts: _Floats,
    first: _Floats,
    length: int,
    num_steps: _Floats | None = None,
) -> Index:
    """Follow the rule in all stretches at once, and return the picks [length, stretches].

    Args:
        weights: Shares [N].
        counts: Counts before the first sample of each stretch [stretches, N], updated in place.
        first: First sample of each stretch.
        length: Samples of a stretch.
        num_steps: Number of samples until a stretch stops counting. None: all.
    """
    num, num_datasets = counts.shape
    shares = np.tile(weights, (num, 1))
    t = np.repeat(np.maximum(first, 1.0), num_datasets).reshape(num, num_datasets)
    error, chosen = np.empty((num, num_datasets)), np.empty(num, np.intp)
    row, flat = num_datasets * np.arange(num), counts.reshape(-1)
    picks = np.empty((length, num), np.int16)
    for step in range(length):
        if step == 1 and first[0] == 0:
            t[0] = 0.0  # samples 0 and 1 both see t = 1
        if step:
            t += 1.0
        np.multiply(shares, t, out=error)
        error -= counts
        error.argmax(1, out=chosen)  # the first of equals
        picks[step] = chosen
        chosen += row
        flat[chosen] += 1.0 if num_steps is None else (step < num_steps)
    return picks


class Blend:
    """Position in a blend -> the data set, and the number of the sample within the data set.

    Args:
        index: Data set of every sample.
        num_datasets: N.
    """

    def __init__(self, index: Index, num_datasets: int) -> None:
        self.index = index
        # Counts of blocks take an eighth of a byte a sample. A look-up counts in half a block.
        self._block = min(max(64 * num_datasets, _SMALLEST_BLOCK), _BLOCK)
        blocks = [
            np.bincount(index[begin : begin + self._block], minlength=num_datasets)
            for begin in range(0, len(index), self._block)
        ]
        self._counts = np.zeros((len(blocks) + 1, num_datasets), np.int64)
        if blocks:
            np.cumsum(blocks, axis=0, out=self._counts[1:])

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, position: int) -> tuple[int, int]:
        """Return the data set of a sample, and the number of earlier samples from the same data
        set.
        """
        dataset, block = self.index.item(position), position // self._block
        within = self.index[block * self._block : position]
        return dataset, self._counts.item(block, dataset) + int(np.count_nonzero(within == dataset))

    def consumed(self, position: int) -> npt.NDArray[np.int64]:
        """Return how many samples of every data set come before ``position`` [N]."""
        block = position // self._block
        within = self.index[block * self._block : position]
        counts = np.bincount(within, minlength=self._counts.shape[1])
        return np.asarray(self._counts[block] + counts)
