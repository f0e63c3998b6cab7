"""Entries of a vocabulary moved between ranks that split vocabularies of different sizes."""

from __future__ import annotations

from torch import Tensor

from megatron_lightning.errors import ShardingError
from megatron_lightning.parallel.collectives import exchange_rows
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.shards.spec import shard_range


def align_vocabulary(
    logits: Tensor, size: int, group: AxisGroup, other_size: int, common: int
) -> Tensor:
    """Return the entries that a rank has of another vocabulary, without a gradient.

    Models pad their vocabularies to different sizes, so that equal tokens may be on different
    ranks. Ranks exchange only what is elsewhere.

    Args:
        logits: [..., v / ranks] this rank's entries of a vocabulary of ``size``, or all of them.
        size: Entries of the full vocabulary.
        group: Ranks that split the other vocabulary.
        other_size: Entries of the other vocabulary.
        common: Entries that are in both.

    Returns:
        [..., w] the rank's entries of the other vocabulary below ``common``.

    Raises:
        ShardingError: If only ``logits`` are split.
    """
    ranks = range(group.size)
    target_ranges = [_cut(other_size, group.size, rank, common) for rank in ranks]
    start, end = target_ranges[max(group.rank, 0)]
    if logits.shape[-1] == size:
        return logits[..., start:end]
    if group.size == 1:
        raise ShardingError(
            f"a rank has {logits.shape[-1]} of the teacher's {size} logits and all of the "
            "student's: only one of the two output layers is split over tensor-parallel ranks. "
            "Use models whose plans split both or neither."
        )
    source_ranges = [_cut(size, group.size, rank, common) for rank in ranks]
    if source_ranges == target_ranges:
        return logits[..., : end - start]
    own_start, own_end = source_ranges[group.rank]
    sent_ranges = [_overlap((own_start, own_end), other_range) for other_range in target_ranges]
    received_ranges = [_overlap((start, end), other_range) for other_range in source_ranges]
    # Ranges of ranks ascend, so that the pieces of a rank are in order.
    rows = logits[..., : own_end - own_start].movedim(-1, 0).contiguous()
    return exchange_rows(rows, sent_ranges, received_ranges, group).movedim(0, -1)


def _cut(size: int, num_ranks: int, rank: int, common: int) -> tuple[int, int]:
    start, length = shard_range(size, num_ranks, rank)
    return min(start, common), min(start + length, common)


def _overlap(first: tuple[int, int], second: tuple[int, int]) -> int:
    return max(0, min(first[1], second[1]) - max(first[0], second[0]))
