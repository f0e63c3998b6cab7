"""Samples skipped by training, by their positions in the order of training.

Positions count from the start of training over all data-parallel ranks, like ``consumed_samples``,
so that positions hold for any layout and batch size. A skipped sample counts as consumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_lightning.errors import ConfigError


class SkippedSamples:
    """Ranges [first, end) of positions.

    Args:
        ranges: Ranges in any order, possibly overlapping.

    Raises:
        ConfigError: If an entry is no range.
    """

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        merged: list[tuple[int, int]] = []
        for given_range in sorted(map(tuple, ranges)):
            if (
                len(given_range) != 2
                or not all(isinstance(n, int) for n in given_range)
                or (not 0 <= given_range[0] < given_range[1])
            ):
                raise ConfigError(
                    f"skip_samples has {list(given_range)}, which is no range. Write pairs [first, "
                    "end] of consumed_samples, the first one below the second."
                )
            first, end = given_range
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((first, end))
        self.ranges = tuple(merged)
        """In order, without overlap."""

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __or__(self, other: SkippedSamples) -> SkippedSamples:
        return SkippedSamples((*self.ranges, *other.ranges))

    def __contains__(self, position: int) -> bool:
        return any(first <= position < end for first, end in self.ranges)

    def left(self, first: int, end: int) -> list[range]:
        """Return the positions from ``first`` to ``end``, without the skipped ranges."""
        ranges = []
        for skipped_first, skipped_end in self.ranges:
            if first < min(skipped_first, end):
                ranges.append(range(first, min(skipped_first, end)))
            first = max(first, skipped_end)
        return [*ranges, range(first, end)] if first < end else ranges

    def behind(self, position: int) -> int:
        """Return the first position from ``position`` on outside of the skipped ranges."""
        return next((end for first, end in self.ranges if first <= position < end), position)

    def after(self, position: int, num_samples: int) -> int:
        """Return the position behind the next ``num_samples`` samples outside of the skipped
        ranges.
        """
        for first, end in self.ranges:
            if end <= position:
                continue
            if position + num_samples <= first:
                break
            num_samples -= max(0, first - position)
            position = end
        return position + num_samples
