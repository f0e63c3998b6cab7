"""Batches of rows cut to their longest text.

Rows of documents of their own are padded to the longest document that a data module allows. A batch
needs only the length of its longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

FULL = "full_length"
"""Key of a sample whose batch keeps the full length. Batches do not have the key."""


DEFAULT_MULTIPLE = 64


def row_multiple(length: int, pad_to: int | None, *, divisor: int = 1) -> int | None:
    """Return the multiple for the lengths of rows. None: all rows keep the full length.

    Args:
        length: Full length.
        pad_to: The user's multiple. None: :data:`DEFAULT_MULTIPLE`.
        divisor: Number that layout and precision divide rows by.
    """
    multiple = lcm(DEFAULT_MULTIPLE if pad_to is None else pad_to, divisor)
    return multiple if multiple < length else None


class FullRow(tuple[int, ...]):
    """Documents of a row whose batch keeps the full length.

    The rows of a run's first batch, so that the first step shows the most memory. The mark belongs
    to the row, not to the start of a run: a resumed run reads batches of the same lengths.
    """

    __slots__ = ()


@dataclass(frozen=True)
class CutRows:
    """Collate samples into a batch, cut to the longest row."""

    rows: tuple[str, ...]
    """Entries [s] of a sample that are rows."""
    flags: tuple[str, ...]
    """Rows that are true for padding."""
    multiple: int
    """Lengths are multiples of this, or the full length."""

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return a batch, with the entries of rows [b, s] cut."""
        is_full = any(sample.pop(FULL, False) for sample in samples)
        batch: dict[str, Tensor] = default_collate(list(samples))
        full = batch[self.flags[0]].shape[1]
        longest = max(int((~batch[flag]).sum(1).max()) for flag in self.flags)
        length = min(full, -(-max(longest, 1) // self.multiple) * self.multiple)
        if is_full or length == full:
            return batch
        cut = {name: batch[name][:, :length].contiguous() for name in self.rows if name in batch}
        return batch | cut
