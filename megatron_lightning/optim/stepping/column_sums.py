"""Column sums of the bits of a tensor, for the detection of writes."""

from __future__ import annotations

import torch
from torch import Tensor

_COLUMNS = 251
"""Words of 8 bytes. A prime: swapped rows of a matrix change the sums."""
_WORD_BYTES = 8


def column_sums(flat: Tensor) -> Tensor:
    """Return sums [columns] of the bits of a contiguous 1-D tensor. Equal bits have equal sums."""
    raw = flat.view(torch.uint8)
    if raw.storage_offset() % _WORD_BYTES:
        raw = raw.clone()
    num_left = len(raw) % _WORD_BYTES
    # Words, since a sum of narrower integers first makes wider copies of all elements.
    words = raw[: len(raw) - num_left].view(torch.int64)
    num_full = len(words) - len(words) % _COLUMNS
    sums = words[:num_full].view(-1, _COLUMNS).sum(0)
    sums[: len(words) - num_full] += words[num_full:]
    sums[_COLUMNS - num_left :] += raw[len(raw) - num_left :]
    return sums
