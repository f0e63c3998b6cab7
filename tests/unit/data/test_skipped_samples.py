"""Positions of samples that training passes over."""

from __future__ import annotations

import pytest
from torch.utils.data import SequentialSampler

from megatron_lightning.data.order.sampler import ResumableSampler
from megatron_lightning.data.order.skipped import SkippedSamples
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.context import AxisGroup


def test_positions_behind_samples_are_those_of_a_list() -> None:
    skipped = SkippedSamples([[8, 10], [3, 5], [4, 6]])
    assert skipped.ranges == ((3, 6), (8, 10))
    left = [p for p in range(30) if p not in skipped]
    for start in range(12):
        following = [p for p in left if p >= start]
        for count in range(1, 10):
            assert skipped.after(start, count) == following[count - 1] + 1, (start, count)
    assert [skipped.behind(p) for p in (2, 3, 9)] == [2, 6, 10]
    for start in range(12):
        for end in range(12):
            rest = [p for r in skipped.left(start, end) for p in r]
            assert rest == [p for p in left if start <= p < end], (start, end)


@pytest.mark.parametrize("wrong", [[[3]], [[5, 5]], [[6, 5]], [[-1, 2]], [[0.5, 2]]])
def test_what_is_no_range_is_refused(wrong: list[list[int]]) -> None:
    with pytest.raises(ConfigError, match=r"which is no range\. Write pairs"):
        SkippedSamples(wrong)


def _samplers(
    size: int, num_samples: int, skipped: list[list[int]], *, drop_last: bool, consumed: int = 0
) -> list[ResumableSampler]:
    return [
        ResumableSampler(
            SequentialSampler(range(num_samples)),
            AxisGroup("dp", tuple(range(size)), rank, None),
            batch_size=lambda _: 4,
            drop_last=drop_last,
            consumed=consumed,
            skipped=SkippedSamples(skipped),
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize("size", [1, 2])
def test_every_other_sample_is_read_once_also_in_later_passes(size: int) -> None:
    """12 samples a pass, batches of 4 over all ranks; ranges in the first and at its end."""
    ranges = [[4, 8], [20, 24], [30, 32]]
    skipped = SkippedSamples(ranges)
    samplers = _samplers(size, 12, ranges, drop_last=True)
    read: list[int] = []
    for number in range(3):
        passes = [list(sampler) for sampler in samplers]
        together = [index for pair in zip(*passes, strict=True) for index in pair]
        read += [12 * number + index for index in together]
        for _ in range(-(-len(together) // 4)):
            for sampler in samplers:
                sampler.advance()
    assert read == [p for p in range(36) if p not in skipped]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("ranges", [[], [[3, 4]], [[0, 1], [5, 10]], [[1, 15]], [[0, 15]]])
def test_ranks_read_equally_many_whatever_is_passed_over(
    size: int, drop_last: bool, ranges: list[list[int]]
) -> None:
    """15 samples a pass. A resumed pass may begin at any position, of another number of ranks."""
    skipped = SkippedSamples(ranges)
    for consumed in (0, 5, 6):
        samplers = _samplers(size, 15, ranges, drop_last=drop_last, consumed=consumed)
        for sampler in samplers:
            sampler.load_state_dict({"consumed": consumed, "generator_states": {}})
        passes = [list(sampler) for sampler in samplers]
        assert len({len(own) for own in passes}) == 1
        read = [index for together in zip(*passes, strict=True) for index in together]
        left = [p for p in range(consumed, 15) if p not in skipped]
        missing = -len(left) % size
        if drop_last:
            assert read == left[: len(left) - len(left) % size]
        else:  # repeated are samples of the pass that are not passed over
            first = [p for p in range(15) if p not in skipped]
            assert read == left + (first * size)[:missing]
