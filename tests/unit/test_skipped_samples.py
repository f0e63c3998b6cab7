"""Positions of samples that training passes over."""

from __future__ import annotations

import pytest
from torch.utils.data import SequentialSampler

from megatron_lightning.data.sampler import ResumableSampler
from megatron_lightning.data.skipped import SkippedSamples
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.context import AxisGroup


def test_positions_behind_samples_are_those_of_a_list() -> None:
    skipped = SkippedSamples([[8, 10], [3, 5], [4, 6]])
    assert skipped.ranges == ((3, 6), (8, 10))
    left = [p for p in range(30) if p not in skipped]
    for start in range(12):
        following = [p for p in left if p >= start]
        for count in range(1, 10):
            assert skipped.after(start, count) == following[count - 1] + 1, (start, count)
    assert [skipped.behind(p) for p in (2, 3, 9)] == [2, 6, 10]


@pytest.mark.parametrize("wrong", [[[3]], [[5, 5]], [[6, 5]], [[-1, 2]], [[0.5, 2]]])
def test_what_is_no_range_is_refused(wrong: list[list[int]]) -> None:
    with pytest.raises(ConfigError, match=r"which is no range\. Write pairs"):
        SkippedSamples(wrong)


@pytest.mark.parametrize("size", [1, 2])
def test_every_other_sample_is_read_once_also_in_later_passes(size: int) -> None:
    """12 samples a pass, batches of 4 over all ranks; ranges in the first and at its end."""
    skipped = SkippedSamples([[4, 8], [20, 24], [30, 32]])
    samplers = [
        ResumableSampler(
            SequentialSampler(range(12)),
            AxisGroup("dp", tuple(range(size)), rank, None),
            batch_size=lambda _: 4,
            drop_last=True,
            skipped=skipped,
        )
        for rank in range(size)
    ]
    read: list[int] = []
    for number in range(3):
        passes = [list(sampler) for sampler in samplers]
        together = [index for pair in zip(*passes, strict=True) for index in pair]
        read += [12 * number + index for index in together]
        for _ in range(-(-len(together) // 4)):
            for sampler in samplers:
                sampler.advance()
    assert read == [p for p in range(36) if p not in skipped]
