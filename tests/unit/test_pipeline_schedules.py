import json
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline import schedules, simulate
from megatron_lightning.pipeline.actions import Action, Kind, Placement, Schedule

ORACLE = json.loads((Path(__file__).parents[1] / "oracles" / "pipeline_schedules.json").read_text())["facts"]


def _table(name: str, placement: Placement, num_microbatches: int, *rows: str) -> Schedule:
    return Schedule(name, placement, num_microbatches, tuple(tuple(map(Action.parse, row.split())) for row in rows))


@pytest.mark.parametrize("text", ["0F0", "2B10", "1I3", "12W0"])
def test_actions_have_a_text_form(text: str) -> None:
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "0X1", "0F", "-1F0", "0F0 1F0"])
def test_text_that_is_no_action(text: str) -> None:
    with pytest.raises(ConfigError, match=r"not a pipeline action.*such as 2F0"):
        Action.parse(text)


def test_the_last_stage_is_on_coordinate_0() -> None:
    assert Placement.loop(4).coordinates == (3, 2, 1, 0)
    assert Placement.loop(2, 3).coordinates == (1, 0, 1, 0, 1, 0)
    assert Placement.v(2).coordinates == (0, 1, 1, 0)
    assert Placement.v(3).stages_of(1) == (1, 4) and Placement.loop(3, 2).stages_of(0) == (2, 5)
    with pytest.raises(ConfigError, match="last stage on coordinate 0"):
        Placement((0, 1))
    with pytest.raises(ConfigError, match="without a stage"):
        Placement((2, 0))


def test_1f1b_reads_as_in_the_paper() -> None:
    assert str(schedules.make_schedule("1f1b", num_coordinates=3, num_microbatches=4)) == (
        "0: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3\n1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n2: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    )


@pytest.mark.parametrize("fact", [f for f in ORACLE if f["vpp"] is None], ids=lambda f: f"pp{f['pp']}-m{f['num_microbatches']}")
def test_1f1b_is_megatrons(fact: dict) -> None:
    """Megatron lists chunk + 1 for a forward and its negative for a backward; its rank is our stage."""
    schedule = schedules.one_f_one_b(fact["pp"], fact["num_microbatches"])
    for stage, rank in enumerate(fact["ranks"]):
        row = schedule.actions[schedule.placement.coordinates[stage]]
        assert [1 if action.kind is Kind.FORWARD else -1 for action in row] == rank["order"]
        assert [action.kind for action in row].index(Kind.BACKWARD) == rank["warmup"] + (rank["remaining"] > 0)


@pytest.mark.parametrize("num_coordinates", [1, 2, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8, 16])
def test_bubble_and_memory_follow_the_formulas(num_coordinates: int, num_microbatches: int) -> None:
    bubble = (num_coordinates - 1) / (num_microbatches + num_coordinates - 1)
    for name in ("gpipe", "1f1b"):
        schedule = schedules.make_schedule(name, num_coordinates=num_coordinates, num_microbatches=num_microbatches)
        simulate.validate(schedule)
        simulate.validate(schedules.forward_only(schedule))
        report = simulate.simulate(schedule)
        assert report.bubble == pytest.approx(bubble)
        assert report.ticks == 2 * (num_microbatches + num_coordinates - 1)
        held = [num_microbatches if name == "gpipe" else min(num_microbatches, c + 1) for c in range(num_coordinates)]
        assert list(report.peak_in_flight) == held


def test_names_resolve_and_unknown_ones_list_the_known() -> None:
    assert schedules.resolve("auto") == "1f1b" and schedules.resolve("auto", 2) == "gpipe"
    with pytest.raises(ConfigError, match=r"'pipedream'.*auto, gpipe, 1f1b"):
        schedules.make_schedule("pipedream", num_coordinates=2, num_microbatches=2)
    with pytest.raises(ConfigError, match="num_microbatches is 0"):
        schedules.make_schedule("1f1b", num_coordinates=2, num_microbatches=0)
    with pytest.raises(ConfigError, match=r"one model chunk.*there are 2.*gpipe"):
        schedules.make_schedule("1f1b", num_coordinates=2, num_microbatches=2, num_chunks=2)


@pytest.mark.parametrize("num_chunks", [2, 3])
def test_gpipe_runs_several_chunks(num_chunks: int) -> None:
    simulate.validate(schedules.make_schedule("gpipe", num_coordinates=3, num_microbatches=4, num_chunks=num_chunks))


def test_a_v_table_with_split_backward_is_valid() -> None:
    table = _table("v", Placement.v(2), 1, "0F0 3F0 3I0 3W0 0I0 0W0", "1F0 2F0 2I0 1I0 2W0 1W0")
    simulate.validate(table)
    assert simulate.simulate(table).peak_in_flight == (2, 2)


DEADLOCK = r"deadlocks: pp rank 0 waits at 1B0 for 1F0; pp rank 1 waits at 0B0 for 1B0"
LOOP2 = Placement.loop(2)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("1B0 1F0", "0F0 0B0"), DEADLOCK),
        (("1F0 1B0", "0F0"), "stage 0, micro-batch 0 the actions F.*one F and one B"),
        (("1F0 1B0", "0F0 0B0 0I0 0W0"), "actions B, F, I, W"),
        (("1F0 1F0 1B0", "0F0 0B0"), "action 1F0 2 times"),
        (("1F0 1B0 0F0", "0B0"), "action 0F0 on pp rank 0, and stage 0 lives on pp rank 1"),
        (("1F0 1B0 2F0", "0F0 0B0"), "action 2F0, and there are 2 stages and 1 micro-batches"),
        (("1F0 1B0",), "1 rows and its placement 2"),
    ],
)
def test_faults_are_named(rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate.validate(_table("mine", LOOP2, 1, *rows))


def test_messages_out_of_order_are_named() -> None:
    table = _table("mine", LOOP2, 2, "1F1 1F0 1B0 1B1", "0F0 0F1 0B0 0B1")
    with pytest.raises(ConfigError, match=r"forward channel from pp rank 1 to 0.*stage 1, micro-batch 0 is sent where"):
        simulate.validate(table)


@given(
    name=st.sampled_from(["gpipe", "1f1b"]),
    num_coordinates=st.integers(1, 5),
    num_microbatches=st.integers(1, 6),
    data=st.data(),
)
@settings(deadline=None, max_examples=150)
def test_a_broken_table_is_caught(name: str, num_coordinates: int, num_microbatches: int, data: st.DataObject) -> None:
    schedule = schedules.make_schedule(name, num_coordinates=num_coordinates, num_microbatches=num_microbatches)
    coordinate = data.draw(st.integers(0, num_coordinates - 1))
    row = list(schedule.actions[coordinate])
    index = data.draw(st.integers(0, len(row) - 1))
    fault = data.draw(st.sampled_from(["drop", "duplicate", "swap"]))
    if fault == "drop":
        assume(num_coordinates * num_microbatches > 1 or row[index].kind is Kind.FORWARD)  # else a forward-only table is left
        del row[index]
    elif fault == "duplicate":
        row.insert(index, row[index])
    else:
        # Neighbours may commute; a swap is a fault only where it breaks a message order or a dependency: same kind with
        # a neighbour stage, or the forward and backward of one micro-batch.
        other = data.draw(st.integers(0, len(row) - 1))
        first, second = row[index], row[other]
        same_kind = first.kind is second.kind and first.microbatch != second.microbatch and num_coordinates > 1
        own_pair = first.kind is not second.kind and first.microbatch == second.microbatch
        assume(same_kind or own_pair)
        row[index], row[other] = second, first
    rows = tuple(tuple(row) if c == coordinate else r for c, r in enumerate(schedule.actions))
    with pytest.raises(ConfigError):
        simulate.validate(Schedule("broken", schedule.placement, num_microbatches, rows))


@given(num_coordinates=st.integers(1, 6), num_chunks=st.integers(1, 3), num_microbatches=st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_any_generated_table_is_valid(num_coordinates: int, num_chunks: int, num_microbatches: int) -> None:
    for name in schedules.SCHEDULES:
        if name == "gpipe" or num_chunks == 1:
            schedule = schedules.SCHEDULES[name](num_coordinates, num_microbatches, num_chunks)
            simulate.validate(schedule)
            simulate.validate(schedules.forward_only(schedule))
