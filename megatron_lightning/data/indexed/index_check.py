"""Check of every length, offset and boundary of an index, in blocks: the memory does not depend on
the number of documents.
"""

from __future__ import annotations

import numpy as np

from megatron_lightning.data.indexed.indexed_files import IndexedDataset
from megatron_lightning.errors import DataError

_BLOCK = 1 << 18


def check_index(indexed: IndexedDataset) -> None:
    """Check every length, offset and boundary of an index.

    Raises:
        DataError: Naming the first that is damaged.
    """
    check_lengths(indexed, 0, len(indexed))
    size, num_bytes = indexed.dtype.itemsize, indexed.num_tokens * indexed.dtype.itemsize
    for begin in range(0, len(indexed), _BLOCK):
        pointers = indexed.sequence_pointers[begin : begin + _BLOCK]
        lengths = indexed.sequence_lengths[begin : begin + _BLOCK]
        ends = pointers + lengths.astype(np.int64) * size
        wrong = np.flatnonzero((pointers < 0) | (ends > num_bytes) | (pointers % size != 0))
        if len(wrong):
            at = wrong[0]
            raise _damaged(
                indexed,
                f"sequence {begin + at} lies at bytes {pointers[at]} to {ends[at]} of {num_bytes}, "
                f"in tokens of {size} bytes",
            )
    for begin in range(0, indexed.num_documents, _BLOCK):
        bounds = indexed.document_indices[begin : begin + _BLOCK + 1]
        backwards = np.flatnonzero(np.diff(bounds) < 0)
        if len(backwards):
            raise _damaged(indexed, f"document {begin + backwards[0]} ends before it begins")


def check_lengths(indexed: IndexedDataset, begin: int, end: int) -> None:
    """Check the lengths of the sequences from ``begin`` to ``end``.

    Raises:
        DataError: Naming the first that is negative.
    """
    lengths = indexed.sequence_lengths[begin:end]
    if len(lengths) and int(lengths.min()) < 0:
        at = int(np.argmax(lengths < 0))
        raise _damaged(indexed, f"sequence {begin + at} has {lengths[at]} tokens")


def _damaged(indexed: IndexedDataset, what: str) -> DataError:
    return DataError(
        f"{indexed.prefix}.idx: {what}: the file is damaged. Copy it again, or run preprocess "
        "again."
    )
