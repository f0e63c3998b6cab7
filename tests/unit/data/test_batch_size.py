"""Global batch sizes and numbers of micro-batches equal megatron-core's
(``tests/oracles/microbatches_vocab.json``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, SequentialSampler

from megatron_lightning.data import BatchSizeSchedule, ScheduledBatchSampler
from megatron_lightning.errors import ConfigError

ORACLE = Path(__file__).parents[2] / "oracles" / "microbatches_vocab.json"
# This version of megatron-core ignores rampup_batch_size, which steps replaced there; the ramp is
# checked by its formula.
FACTS = [
    fact
    for fact in json.loads(ORACLE.read_text())["facts"]["num_microbatches"]
    if "rampup_batch_size" not in fact["args"]
]


@pytest.mark.parametrize("fact", FACTS, ids=str)
def test_sizes_are_megatron_cores(fact: dict[str, Any]) -> None:
    args = dict(fact["args"])
    micro, ranks = args.pop("micro_batch_size"), args.pop("data_parallel_size")
    if "seq_length" in args:
        args["sequence_length"] = args.pop("seq_length")
    schedule = BatchSizeSchedule(**args)
    if "error" in fact:
        with pytest.raises(ConfigError) as error:
            schedule.num_microbatches(micro, ranks)
        assert str(error.value).startswith(fact["error"].removeprefix("AssertionError: "))
        return
    for consumed, num_microbatches, size, running in fact["points"]:
        assert schedule.batch_size(consumed) == size
        assert schedule.running_batch_size(consumed, micro * ranks) == running
        assert running // micro // ranks == num_microbatches
        assert num_microbatches in schedule.num_microbatches(micro, ranks)


def test_the_ramp_has_equal_parts() -> None:
    schedule = BatchSizeSchedule(global_batch_size=64, rampup_batch_size=(16, 8, 300))
    assert schedule.sizes == [16, 24, 32, 40, 48, 56, 64]
    sizes = [schedule.batch_size(consumed) for consumed in range(400)]
    assert [sizes.index(size) for size in schedule.sizes] == [0, 50, 100, 150, 200, 250, 300]
    assert BatchSizeSchedule(global_batch_size=8, rampup_batch_size=(8, 8, 10)).batch_size(3) == 8
    assert BatchSizeSchedule(global_batch_size=8, rampup_batch_size=(4, 4, 0)).batch_size(0) == 8


def _sizes(loader: DataLoader[Any]) -> list[int]:
    return [len(batch) for batch in loader]


def test_a_dataloader_serves_growing_batches() -> None:
    schedule = BatchSizeSchedule(global_batch_size=8, step_batch_size_schedule="0:2 8:4 16:8")
    loader: DataLoader[Any] = DataLoader(
        range(25), batch_sampler=ScheduledBatchSampler(SequentialSampler(range(25)), schedule)
    )
    batches = [batch.tolist() for batch in loader]
    assert [len(batch) for batch in batches] == [2, 2, 2, 2, 4, 4, 8]
    assert [index for batch in batches for index in batch] == list(range(24))
    assert _sizes(loader) == [8, 8, 8]  # the second pass resumes where the first ended
    with pytest.raises(TypeError, match="depends on how many samples"):
        len(loader)
    kept = ScheduledBatchSampler(range(11), schedule, drop_last=False, num_replicas=2)
    assert [len(batch) for batch in kept] == [1, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rampup_batch_size": (2, 2, 9), "step_batch_size_schedule": "0:8"}, "are both set"),
        (
            {"rampup_batch_size": (16, 2, 9)},
            r"rampup_batch_size=\[16, 2, 9\] does not lead up to global_batch_size=8",
        ),
        (
            {"rampup_batch_size": (2, 4, 9)},
            "from 2 to global_batch_size=8 is not a multiple of the increment. Set",
        ),
        ({"step_batch_size_schedule": "0:2 5:x 9:8"}, "'5:x' is not position:size"),
        ({"step_batch_size_schedule": "1:8"}, "does not begin at 0"),
        ({"step_batch_size_schedule": "0:2 5:4"}, "ends with 4, and global_batch_size is 8"),
        (
            {"step_batch_size_schedule": "0:16 5:8"},
            r"sizes are \[16, 8\]; they must be positive and must not decrease",
        ),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchSizeSchedule(global_batch_size=8, **values)


def test_a_size_that_ranks_cannot_share_names_the_numbers() -> None:
    schedule = BatchSizeSchedule(global_batch_size=8, rampup_batch_size=(2, 2, 10))
    with pytest.raises(
        ConfigError,
        match=r"global batch size \(2\) is not divisible by micro batch size \(1\) times data",
    ):
        schedule.num_microbatches(1, 4)
