"""Ranks that wait for each other forever end within seconds, and both sides are named."""

from __future__ import annotations

import pytest

from megatron_lightning.resilience.collective_log import Course, Record, apart, crosses, passed
from tests.faults.processes import run_to_the_end

ALIKE = "reduce_boolean_decision"
ON_ALL = "Call it on all ranks"


def _record(rank: int, *calls: str | tuple[str, tuple[int, ...]], **more: object) -> Record:
    course = Course()
    for call in calls:
        course.mark(*([call] if isinstance(call, str) else call))
    return Record(rank, course.marks(), course.num_calls, **more)  # type: ignore[arg-type]


def test_a_slow_rank_is_not_apart() -> None:
    fast = _record(0, "batch 0", ("reduce", (0, 1)), "batch 1", "batch 2")
    for num in range(4):
        slow = _record(1, *["batch 0", ("reduce", (0, 1)), "batch 1"][:num])
        assert apart(fast, slow) is None and apart(slow, fast) is None, num
    assert apart(fast, _record(2, "batch 0", "batch 1", ("reduce", (2, 3)))) is None


def test_calls_in_the_place_of_others_are_apart() -> None:
    full = apart(_record(0, "batch 0", "full"), _record(1, "batch 0", "batch 1", "batch 2"))
    assert full is not None and [mark.what for mark in full] == ["full", "batch 1"]
    one, other = _record(0, "batch 0", ("reduce", (0, 1))), _record(1, "batch 0", "batch 1")
    for first, second, calls in (
        (one, other, ["reduce", "batch 1"]),
        (other, one, ["batch 1", "reduce"]),
    ):
        marks = apart(first, second)
        assert marks is not None and [mark.what for mark in marks] == calls
    assert apart(one, _record(2, "batch 0", "batch 1")) is None  # not of the group


def test_only_the_last_calls_are_compared() -> None:
    long = [f"batch {index}" for index in range(1000)]
    assert apart(_record(0, *long), _record(1, *long[:10])) is None
    assert apart(_record(0, *long), _record(1, *long[:980])) is None
    assert apart(_record(0, *long), _record(1, *long[:980], "the end")) is not None
    # The reduction is not among the last calls of the fast rank.
    behind = _record(1, "batch 0", ("reduce", (0, 1)))
    for num in range(60, 70):
        ahead = _record(0, "batch 0", ("reduce", (0, 1)), *long[1:num])
        assert apart(ahead, behind) is None and apart(behind, ahead) is None, num


def test_a_collective_that_another_rank_has_passed() -> None:
    waiting = _record(0, "batch 0", waits_in="all_reduce", waits_for=(0, 1), function="all_reduce")
    mark = passed(waiting, _record(1, "batch 0", "batch 1"), {})
    assert mark is not None and mark.what == "batch 1"
    assert passed(waiting, _record(1, "batch 0"), {}) is None
    assert passed(waiting, _record(2, "batch 0", "batch 1"), {}) is None


def test_a_late_rank_may_hold_up_a_broadcast_that_its_source_has_left() -> None:
    name = "broadcast_object_list"
    waiting = _record(3, "batch 0", waits_in=name, waits_for=(0, 2, 3), function=name)
    source, late = _record(0, "batch 0", "batch 1"), _record(2, "batch 0")
    there = _record(2, "batch 0", waits_in="all_reduce", waits_for=(0, 2), function="all_reduce")
    gone = _record(2, "batch 0", "batch 1")
    for other, is_held_up in ((late, True), (None, True), (there, False), (gone, False)):
        records = {r.rank: r for r in (source, waiting, other) if r is not None}
        assert (passed(waiting, source, records) is None) == is_held_up, other


def test_ranks_in_two_collectives_wait_for_each_other_unless_another_is_late() -> None:
    one = _record(0, waits_in="a", waits_for=(0, 1), function="a")
    other = _record(1, waits_in="b", waits_for=(0, 1, 2), function="b")
    late, there = _record(2), _record(2, waits_in="b", waits_for=(0, 1, 2), function="b")
    assert crosses(one, other, {0: one, 1: other, 2: there})
    assert not crosses(one, other, {0: one, 1: other, 2: late})
    assert not crosses(one, other, {0: one, 1: other})
    assert not crosses(other, there, {0: one, 1: other, 2: there})


@pytest.mark.slow
@pytest.mark.timeout(240)  # every process of a job imports torch and lightning
@pytest.mark.parametrize(
    ("case", "layout", "words"),
    [
        ("full", "pp2", ["rank 0 has come to strategy.full_state_dict()", "lone.py", ON_ALL]),
        *(
            (case, layout, words)
            for case, layouts, words in (
                ("stop", ["tp2", "pp2", "zero1"], [ALIKE]),
                ("stop-of-1", ["tp2", "pp2", "zero1"], [ALIKE]),
                ("skip", ["tp2", "pp2"], [ALIKE]),
                ("skip-of-1", ["tp2", "pp2"], [ALIKE]),
                ("full", ["tp2"], ["strategy.full_state_dict()", ON_ALL]),
                ("forward", ["tp2", "fsdp2"], ["forward", "lone.py", ON_ALL]),
                ("forward", ["pp2"], ["outside of a training"]),
                ("broadcast", ["tp2", "pp2"], ["a broadcast of the strategy", ON_ALL]),
            )
            for layout in layouts
        ),
    ],
)
def test_what_one_rank_does_alone_ends_the_job(case: str, layout: str, words: list[str]) -> None:
    code, output, elapsed_s = run_to_the_end(["-m", "tests.faults.lone", case, layout])
    assert code != 0 and elapsed_s < 25, output  # 8 s on a quiet machine
    for word in words:
        assert word in output, output
    assert output.count("ranks wait for each other forever") == ("outside" not in words[0])


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_rank_may_take_its_time(layout: str) -> None:
    code, output, _ = run_to_the_end(["-m", "tests.faults.lone", "slow", layout])
    assert code == 0 and "DONE" in output, output
