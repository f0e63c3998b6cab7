"""Rows of several experts: amax of each expert, and blocks within a single expert.

Shapes: ``t`` rows, sorted by expert, ``E`` experts with ``counts`` [E] rows, ``p`` rows after
padding each expert with zeros to full blocks. ``p`` depends only on shapes, so no count is read
from a device. Leftover rows belong to the last expert.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expert_of_rows(counts: Tensor, num_rows: int) -> Tensor:
    """Return the expert of every row [t]."""
    experts = torch.arange(len(counts), device=counts.device)
    return experts.repeat_interleave(counts, output_size=num_rows)


def amax_of_experts(row_amax: Tensor, experts: Tensor, num_experts: int) -> Tensor:
    """Return the largest of the rows' values for each expert: [t, n], [t] -> [E, n]."""
    index = experts[:, None].expand_as(row_amax)
    zeros = row_amax.new_zeros(num_experts, row_amax.shape[1])
    return zeros.scatter_reduce(0, index, row_amax, "amax")


def num_padded(num_rows: int, num_experts: int, size: int) -> int:
    """Return the padded number of rows (p) for any division of ``num_rows``."""
    return (num_rows + num_experts * (size - 1)) // size * size


def padded_counts(counts: Tensor, size: int, total: int) -> Tensor:
    """Return the padded rows of each expert [E], of ``total``."""
    padded = (counts + (size - 1)).div(size, rounding_mode="floor") * size
    remainder = torch.zeros_like(padded)
    remainder[-1] = total - padded.sum()
    return padded + remainder


def pad_experts(x: Tensor, counts: Tensor, size: int) -> Tensor:
    """Return rows [t, n] as [p, n], each expert's in whole blocks of ``size``."""
    total = num_padded(len(x), len(counts), size)
    padded = padded_counts(counts, size, total)
    moved = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    places = torch.arange(len(x), device=x.device)
    places = places + moved.repeat_interleave(counts, output_size=len(x))
    return x.new_zeros(total, x.shape[1]).index_copy(0, places, x)
