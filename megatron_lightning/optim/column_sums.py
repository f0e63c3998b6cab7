"""Column sums of the bits of a tensor, which show that it was written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_COLUMNS = 512  # 4 KB a record
_INTEGERS: Mapping[int, torch.dtype] = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}


def column_sums(flat: Tensor) -> Tensor:
    """Return sums [columns] of the bits of a contiguous 1-D tensor; equal for equal bits."""
    integers = bits(flat)
    full = len(integers) - len(integers) % _COLUMNS
    sums = integers[:full].view(-1, _COLUMNS).sum(0, dtype=torch.int64)
    sums[: len(integers) - full] += integers[full:]
    return sums


def bits(flat: Tensor) -> Tensor:
    """View a contiguous tensor as integers, of which NaN equals itself."""
    return flat.view(_INTEGERS[flat.itemsize])
