"""Document, sample and shuffle index of Megatron's GPTDataset (``core/datasets/gpt_dataset.py``),
as functions of sizes.

Documents are repeated for E epochs and shuffled (document index), read as a stream of tokens, split
every q tokens (sample index). The samples are shuffled (shuffle index). A sample reads q + x
tokens: with x = 1 extra token, neighbors share a token, so that every token but the first is a
label once. D: documents in the split, t: tokens of the documents, n: samples.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from megatron_lightning.errors import ConfigError

Bounds = tuple[float, float]
# A final epoch used for less than this fraction is shuffled separately.
_MIN_FULL_FINAL_EPOCH = 0.80
_BLOCK = 1 << 22  # documents


def split_matrix(split: str) -> list[Bounds | None]:
    """Return the bounds in [0, 1] of train, validation and test for weights such as ``"969,30,1"``.
    None for weight zero.

    Raises:
        ConfigError: If ``split`` is not one to three weights with a positive sum.
    """
    text = split.replace(" ", "")
    if not re.fullmatch(r"(\d+\.?\d*|\.\d+)(,(\d+\.?\d*|\.\d+)){0,2}", text) or not any(
        map(float, text.split(","))
    ):
        raise ConfigError(
            f"split={split!r}: must be one to three weights with a positive sum for "
            'train,valid,test, such as "969,30,1"'
        )
    weights = [*map(float, text.split(",")), 0.0, 0.0][:3]
    fractions = [weight / float(np.sum(weights)) for weight in weights]
    edges: list[float] = list(accumulate(fractions, initial=0))
    return [(begin, end) if end > begin else None for begin, end in pairwise(edges)]


def split_sequences(bounds: Bounds, num_sequences: int) -> range:
    """Return the sequences [D] in ``bounds``."""
    begin, end = (round(bound * float(num_sequences)) for bound in bounds)
    return range(begin, end)


@dataclass(frozen=True)
class EpochPlan:
    """Sizes of the epochs over the documents."""

    num_epochs: int
    """E, the smallest number of epochs with the requested samples."""
    num_samples: int
    """n, all samples of these epochs, at least the requested number."""
    num_samples_before_final: int
    """Samples shuffled apart from the final epoch's. 0 if all epochs are shuffled together."""


def plan_epochs(
    num_tokens: int,
    num_requested: int | None,
    sequence_length: int,
    extra: int,
    drop_last: bool = True,
) -> EpochPlan:
    """Return the plan for ``num_tokens`` (t > 0) tokens an epoch.

    Args:
        num_tokens: Tokens of an epoch.
        num_requested: Samples requested. None: the samples of an epoch.
        sequence_length: Tokens of a sample (q).
        extra: 1 if a sample reads an extra token for the last label, else 0 (x).
        drop_last: Whether tokens too few for a sample are dropped instead of padded.
    """
    num_epochs = (
        1
        if num_requested is None
        else max(1, -((num_requested * sequence_length + extra) // -num_tokens))
    )
    usable = num_epochs * num_tokens - extra
    num_samples = usable // sequence_length if drop_last else -(usable // -sequence_length)
    if num_epochs == 1 or num_requested is None:
        return EpochPlan(num_epochs, num_samples, 0)
    # Megatron-Core's rule: if little of the last epoch is needed, the last epoch is shuffled by
    # itself, so that its samples stay a random choice of all.
    before_final = ((num_epochs - 1) * num_tokens - extra) // sequence_length
    per_epoch = (num_tokens - extra) // sequence_length
    separate = num_requested - before_final < int(_MIN_FULL_FINAL_EPOCH * per_epoch)
    return EpochPlan(num_epochs, num_samples, before_final if separate else 0)


@dataclass(frozen=True)
class SampleIndices:
    """The three arrays behind every sample."""

    document_index: npt.NDArray[np.int32]
    """Sequence read at each position of the stream [E * D]."""
    sample_index: npt.NDArray[np.int32 | np.int64]
    """Position in the document index, and token offset in the document, at the start of each sample
    [n + 1, 2]."""
    shuffle_index: npt.NDArray[np.uint32 | np.int64]
    """Row of the sample index served as sample i [n]."""


def build_indices(
    sequence_lengths: npt.NDArray[np.int32],
    sequences: range,
    plan: EpochPlan,
    *,
    sequence_length: int,
    extra: int,
    seed: int,
) -> SampleIndices:
    """Build the indices of ``sequences`` [D]. For the other arguments see :func:`plan_epochs`.

    Both shuffles draw from ``numpy.random.RandomState(seed)``, documents before samples.
    """
    # One stream of numbers for both shuffles, in Megatron-Core's order: the result is equal to the
    # bit.
    random = np.random.RandomState(seed)
    num_final = len(sequences) if plan.num_samples_before_final > 0 else 0
    document_index = _repeated(sequences, plan.num_epochs)
    _shuffle_parts(random, document_index, len(document_index) - num_final)
    sample_index = sample_starts(
        sequence_lengths, document_index, plan.num_samples, sequence_length, extra
    )
    shuffle_index: npt.NDArray[np.uint32 | np.int64] = np.arange(
        plan.num_samples, dtype=shuffle_dtype(plan.num_samples)
    )
    _shuffle_parts(random, shuffle_index, plan.num_samples_before_final)
    return SampleIndices(document_index, sample_index, shuffle_index)


def shuffle_dtype(num_samples: int) -> type[np.uint32 | np.int64]:
    """Return the type of a shuffle index: Megatron's, with 64 bits where 32 do not suffice."""
    return np.uint32 if num_samples < np.iinfo(np.uint32).max - 1 else np.int64


def _repeated(sequences: range, num_epochs: int) -> npt.NDArray[np.int32]:
    """Return the sequences of all epochs [E * D]."""
    num = len(sequences)
    documents = np.empty((num_epochs, num), np.int32)
    for begin in range(0, num, _BLOCK):  # without a second array of all documents
        end = min(begin + _BLOCK, num)
        documents[:, begin:end] = np.arange(sequences.start + begin, sequences.start + end)
    return documents.reshape(-1)


def _shuffle_parts(
    random: np.random.RandomState, array: npt.NDArray[np.generic], boundary: int
) -> None:
    """Shuffle the entries before ``boundary``, then the other entries, in place."""
    random.shuffle(array[:boundary])
    random.shuffle(array[boundary:])


def sample_starts(
    lengths: npt.NDArray[np.int32],
    document_index: npt.NDArray[np.int32],
    num_samples: int,
    sequence_length: int,
    extra: int,
) -> npt.NDArray[np.int32 | np.int64]:
    """Return the starts of the samples as (position in ``document_index``, offset)
    [n + 1, 2]: tokens j * q of the stream of documents.

    A start belongs to the document of the last token read by the previous sample, at j * q + x - 1.
    The end of the stream bounds a partial last sample. The documents are read in blocks, so that
    the memory beyond the result does not depend on their number.

    Args:
        lengths: Tokens of each sequence.
        document_index: Sequence at each position of the stream.
        num_samples: Number of samples (n).
        sequence_length: Tokens of a sample (q).
        extra: See :func:`plan_epochs` (x).
    """
    num_documents = len(document_index)
    fits = max(num_documents, int(lengths.max())) <= np.iinfo(np.int32).max
    starts_of = np.empty((num_samples + 1, 2), np.int32 if fits else np.int64)
    num_before = row = 0  # tokens before the block, rows written
    # In blocks of documents, so that cumulative lengths need little memory. Lookups are vectorized
    # within a block.
    for begin in range(0, num_documents, _BLOCK):
        sizes = lengths[document_index[begin : begin + _BLOCK]]
        ends = np.cumsum(sizes, dtype=np.int64)
        num_read, is_last = num_before + int(ends[-1]), begin + _BLOCK >= num_documents
        stop = num_samples + 1
        if not is_last:
            stop = min(stop, -((num_read - extra + 1) // -sequence_length))
        starts = np.arange(row, stop, dtype=np.int64) * sequence_length
        if is_last:
            starts = np.minimum(starts, num_read - extra)
        starts -= num_before
        positions = np.searchsorted(ends, starts + extra - 1, side="right")
        documents = np.minimum(positions, len(sizes) - 1)
        starts_of[row:stop, 0] = documents + begin
        starts_of[row:stop, 1] = starts - (ends[documents] - sizes[documents])
        num_before, row = num_read, max(row, stop)
    starts_of[0] = 0
    return starts_of
