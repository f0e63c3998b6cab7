import json
import pickle
from collections import defaultdict, deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

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
        assert report.step_time == 3 * (num_microbatches + num_coordinates - 1)
        held = [num_microbatches if name == "gpipe" else min(num_microbatches, c + 1) for c in range(num_coordinates)]
        assert list(report.peak_in_flight) == held


def test_names_resolve_and_unknown_ones_list_the_known() -> None:
    assert str(schedules.resolve("auto", num_coordinates=1)) == "1f1b (the one pipeline rank holds one model chunk)"
    assert str(schedules.resolve("auto", num_coordinates=4)) == "1f1b (each of the 4 pipeline ranks holds one model chunk)"
    several = schedules.resolve("auto", num_coordinates=4, num_chunks=2)
    assert str(several) == "interleaved (each of the 4 pipeline ranks holds 2 model chunks)"
    assert several.placement == Placement.loop(4, 2) and several.table(6).num_microbatches == 6
    with pytest.raises(ConfigError, match=r"'pipedream'.*auto, gpipe, 1f1b, interleaved, zb-h1, zbv"):
        schedules.make_schedule("pipedream", num_coordinates=2, num_microbatches=2)
    with pytest.raises(ConfigError, match="num_microbatches is 0"):
        schedules.make_schedule("1f1b", num_coordinates=2, num_microbatches=0)
    with pytest.raises(ConfigError, match=r"one model chunk.*there are 2.*interleaved.*gpipe"):
        schedules.make_schedule("1f1b", num_coordinates=2, num_microbatches=2, num_chunks=2)
    with pytest.raises(ConfigError, match=r"zb-h1 runs one model chunk.*there are 2.*size to 1.*zbv"):
        schedules.make_schedule("zb-h1", num_coordinates=2, num_microbatches=2, num_chunks=2)
    with pytest.raises(ConfigError, match=r"zbv runs two model chunks.*there are 3.*size to 2"):
        schedules.make_schedule("zbv", num_coordinates=2, num_microbatches=2, num_chunks=3)
    with pytest.raises(ConfigError, match="num_chunks is 0"):
        schedules.make_schedule("1f1b", num_coordinates=2, num_microbatches=2, num_chunks=0)
    with pytest.raises(ConfigError, match=r"microbatch_group_size_per_vp_stage is 4, and schedule 1f1b.*interleaved"):
        schedules.resolve("1f1b", num_coordinates=2, microbatch_group_size=4)
    with pytest.raises(ConfigError, match=r"microbatch_group_size_per_vp_stage is 4.*nothing to group"):
        schedules.resolve("interleaved", num_coordinates=2, microbatch_group_size=4)


@pytest.mark.parametrize("fact", [f for f in ORACLE if f["vpp"]], ids=lambda f: "-".join(map(str, list(f.values())[:4])))
def test_interleaved_is_megatrons(fact: dict) -> None:
    """Megatron's rank is our stage modulo the ranks; its order lists chunk + 1, negative for a backward."""
    pp, group = fact["pp"], fact["microbatch_group_size_per_vp_stage"]
    schedule = schedules.interleaved(pp, fact["num_microbatches"], fact["vpp"], group)
    simulate.validate(schedule)
    visits = list(zip(fact["virtual_table_microbatch"], fact["virtual_table_chunk"], strict=True))
    for rank, expected in enumerate(fact["ranks"]):
        row = schedule.actions[pp - 1 - rank]
        assert [(a.microbatch, a.stage // pp) for a in row if a.kind is Kind.FORWARD] == visits
        assert [(a.microbatch, fact["vpp"] - 1 - a.stage // pp) for a in row if a.kind is Kind.BACKWARD] == visits
        first_backward = next(position for position, action in enumerate(row) if action.kind is Kind.BACKWARD)
        assert first_backward == expected["warmup"] + (not expected["all_in_warmup"])
        if "order" in expected:
            chunks = [action.stage // pp + 1 for action in row]
            signs = [1 if action.kind is Kind.FORWARD else -1 for action in row]
            assert [sign * chunk for sign, chunk in zip(signs, chunks, strict=True)] == expected["order"]


@pytest.mark.parametrize(
    ("num_microbatches", "group", "message"),
    [
        (8, 3, r"is 3, below the 4 pipeline ranks.*Set it to 4 or more"),
        (9, 4, r"9 micro-batches.*stage=4 leave a last group of 1.*stage to 5 or 9, or run 8 or 12"),
    ],
)
def test_groups_that_do_not_fit_are_named(num_microbatches: int, group: int, message: str) -> None:
    sizes = {"num_coordinates": 4, "num_chunks": 3, "num_microbatches": num_microbatches}
    with pytest.raises(ConfigError, match=message):
        schedules.make_schedule("interleaved", **sizes, microbatch_group_size=group)
    simulate.validate(schedules.make_schedule("interleaved", **sizes))  # the group size it chooses itself always fits


def _torchs(kind: type, pp: int, chunks: int, num_microbatches: int) -> list[list[str]]:
    """Return the compute actions of one of PyTorch's schedules, by its own rank."""
    v_placed = kind.__name__ == "ScheduleZBVZeroBubble"
    others = [[rank, 2 * pp - 1 - rank] if v_placed else [rank + chunk * pp for chunk in range(chunks)] for rank in range(pp)]
    shared = {"submod": None, "group": None, "group_size": pp, "group_rank": 0, "num_stages": pp * chunks, "has_backward": True}
    ends = {"is_first": False, "is_last": False, "stage_index_to_group_rank": {}}
    stages = [SimpleNamespace(**shared, **ends, stage_index=index) for index in others[0]]
    schedule = kind(stages, num_microbatches, loss_fn=torch.nn.functional.mse_loss)
    return [[str(action) for action in schedule.pipeline_order[rank] if action is not None] for rank in range(pp)]


@pytest.mark.parametrize(
    ("pp", "chunks", "num_microbatches"), [(2, 2, 4), (2, 4, 6), (4, 2, 8), (4, 2, 6), (4, 3, 12), (8, 2, 16)]
)
def test_interleaved_is_torchs(pp: int, chunks: int, num_microbatches: int) -> None:
    rounds = max(1, num_microbatches // pp)
    ours = schedules.interleaved(pp, num_microbatches, chunks, num_microbatches // rounds)
    theirs = _torchs(ScheduleInterleaved1F1B, pp, chunks, num_microbatches)
    assert [list(map(str, row)) for row in reversed(ours.actions)] == theirs
    assert schedules.read_rows("torch", [" ".join(row) for row in theirs]).actions == ours.actions


@pytest.mark.parametrize(("pp", "num_microbatches"), [(2, 1), (2, 4), (3, 7), (4, 2), (4, 8), (8, 16), (8, 5)])
def test_zbv_is_torchs(pp: int, num_microbatches: int) -> None:
    ours = schedules.zbv(pp, num_microbatches)
    assert [list(map(str, row)) for row in ours.actions] == _torchs(ScheduleZBVZeroBubble, pp, 2, num_microbatches)


@pytest.mark.parametrize("num_coordinates", [1, 2, 4, 8])
def test_zero_bubble_has_a_third_of_the_bubble_in_the_same_memory(num_coordinates: int) -> None:
    """F, I and W take one tick each; a chunk of zbv is half of a stage of the others."""
    for num_microbatches in (2 * num_coordinates - 1, 2 * num_coordinates + 3):
        for name, chunks in (("zb-h1", 1), ("zbv", 2)):
            schedule = schedules.make_schedule(
                name, num_coordinates=num_coordinates, num_microbatches=num_microbatches, num_chunks=chunks
            )
            report = simulate.simulate(schedule)
            assert report.step_time == 3 * chunks * num_microbatches + num_coordinates - 1
            assert max(report.peak_in_flight) == chunks * num_coordinates


OWN = """1F0, ,1F1,,1B0,1B1
0F0,0F1,,0B0,0I1,0W1
"""


def make_own(num_coordinates: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """A user's function: 1F1B whose last rank computes weight gradients apart."""
    schedule = schedules.one_f_one_b(num_coordinates, num_microbatches, num_chunks)
    split = {Kind.FORWARD: (Kind.FORWARD,), Kind.BACKWARD: (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)}
    last = tuple(action._replace(kind=kind) for action in schedule.actions[0] for kind in split[action.kind])
    return Schedule("own", schedule.placement, num_microbatches, (last, *schedule.actions[1:]))


def deadlocked(num_coordinates: int, num_microbatches: int, num_chunks: int) -> Schedule:
    schedule = schedules.one_f_one_b(num_coordinates, num_microbatches, num_chunks)
    return Schedule("own", schedule.placement, num_microbatches, tuple(row[::-1] for row in schedule.actions))


def failing(num_coordinates: int, num_microbatches: int, num_chunks: int) -> Schedule:
    raise ZeroDivisionError("division by zero")


def of_words(num_coordinates: int, num_microbatches: int, num_chunks: int) -> Schedule:
    return Schedule("own", Placement.loop(2), 1, (("1F0", "1B0"), ("0F0", "0B0")))  # type: ignore[arg-type]


def of_text_kinds(num_coordinates: int, num_microbatches: int, num_chunks: int) -> Schedule:
    rows = tuple((Action(s, "F", 0), Action(s, "B", 0)) for s in (1, 0))  # type: ignore[arg-type]
    return Schedule("own", Placement.loop(2), 1, rows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1F0,1B0\n\n0F0,0x0\n", r"schedule mine\.csv, line 3: '0x0' is not a pipeline action; write"),
        ("1F0,1B0\n\n0F0,1F1,0B0\n", r"schedule mine\.csv has stage 1 in line 1 and in line 3"),
        ("", r"mine\.csv has the stages none"),
        ("1F0,\0", r"mine\.csv', which cannot be read as a CSV file|line 1: '.*' is not a pipeline action"),
    ],
)
def test_mistakes_in_a_file_are_told_by_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        schedules.resolve(str(path), num_coordinates=2)


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(OWN)
    choice = schedules.resolve(str(path), num_coordinates=2)
    assert choice.name == "mine.csv" and choice.placement == Placement.loop(2)
    assert str(choice.table(2)) == "0: 1F0 1F1 1B0 1B1\n1: 0F0 0F1 0B0 0I1 0W1"
    assert schedules.read_rows("again", schedules.write_csv(choice.table(2)).splitlines()).actions == choice.table(2).actions
    assert str(choice.forward_table(2)) == "0: 1F0 1F1\n1: 0F0 0F1"
    simulate.validate(choice.forward_table(5))
    simulate.validate(choice.table_or_sweep(5))
    assert choice.table_or_sweep(2) == choice.table(2) and choice.splits_backward
    assert schedules.resolve("interleaved", num_coordinates=4, num_chunks=3, microbatch_group_size=11).table(11)
    with pytest.raises(
        ConfigError, match=r"mine.csv is a table for 2 micro-batches, and the run has 3.* a batch has 2 micro-batches"
    ):
        choice.table(3)
    with pytest.raises(
        ConfigError, match=r"mine.csv is a table for 2 pipeline ranks, and the run has 4.*pipeline_model_parallel_size to 2"
    ):
        schedules.resolve(str(path), num_coordinates=4)
    rows = schedules.resolve(["0F0 0B0", "1F0 1B0"], num_coordinates=2)  # the first stage on the first row: turned round
    assert str(rows.table(1)) == "0: 1F0 1B0\n1: 0F0 0B0" and pickle.loads(pickle.dumps(rows)) == rows


def test_a_function_of_ones_own() -> None:
    choice = schedules.resolve(f"{__name__}.make_own", num_coordinates=2)
    assert choice.name.endswith("make_own") and str(choice.table(1)) == "0: 1F0 1I0 1W0\n1: 0F0 0B0"
    assert pickle.loads(pickle.dumps(choice)) == choice
    simulate.validate(choice.forward_table(3))
    with pytest.raises(ConfigError, match=r"deadlocks: pp rank 0 waits at"):
        schedules.resolve(f"{__name__}.deadlocked", num_coordinates=2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no/such/table.csv", r"'no/such/table\.csv', which cannot be read"),
        ("no_such_package.make", r"'no_such_package\.make', which cannot be imported"),
        (f"{__name__}.nothing", r"cannot be imported.*nothing"),
        (f"{__name__}.OWN", r"a str\. Set it to a function"),
        ("pathlib.Path.cwd", r"cannot be imported"),
        ("..make", r"'\.\.make', which cannot be imported"),
        ("os.getcwd", r"os\.getcwd takes the arguments \(\).*Let it take \(num_coordinates, "),
        ("builtins.max", r"max, called with num_coordinates=2, num_microbatches=2, num_chunks=1, returned int\. Let it return"),
        (
            f"{__name__}.failing",
            r"failing, called with num_coordinates=2, num_microbatches=2, num_chunks=1, raised ZeroDivisionError: div.*Let it",
        ),
        (f"{__name__}.of_words", r"of_words, called .* returned a Schedule with '1F0' among its actions\. Write Action\("),
        (f"{__name__}.of_text_kinds", r"of_text_kinds, called .* with Action\(stage=1, kind='F', microbatch=0\) among"),
        ([], r"has the stages none"),
        (["1F0 1B0", ""], r"no action in row 2"),
        (["1F0 1B0", "0F0 1B0"], r"has stage 1 in row 1 and in row 2"),
        (["2F0 2B0", "0F0 0B0"], r"has the stages 0, 2\. Number them"),
        (["0F0 0B0", "2F0 2B0", "1F0 1B0"], r"has the last stage, 2, in row 2, .* Put it into row 1 \(or row 3: the rows are"),
        (["1F0 1B0", "0F0 0b0"], r"schedule table, row 2: '0b0' is not a pipeline action"),
        (["1F0", "0F0"], r"has no backwards"),
        (["1F0 1B0", "0F0"], r"stage 0, micro-batch 0 the actions F"),
    ],
)
def test_wrong_tables_of_ones_own(spec: str | list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schedules.resolve(spec, num_coordinates=2)


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


def test_numbers_below_zero_are_named() -> None:
    table = _table("mine", LOOP2, 1, "1F0 1B0", "0F0 0B0")
    rows = ((*table.actions[0], Action(-1, Kind.FORWARD, 0)), table.actions[1])  # stage -1 would be the last of a tuple
    with pytest.raises(ConfigError, match="action -1F0, and there are 2 stages"):
        simulate.validate(replace(table, actions=rows))


def test_messages_out_of_order_are_named() -> None:
    table = _table("mine", LOOP2, 2, "1F1 1F0 1B0 1B1", "0F0 0F1 0B0 0B1")
    with pytest.raises(ConfigError, match=r"forward channel from pp rank 1 to 0.*stage 1, micro-batch 0 is sent where"):
        simulate.validate(table)


CHUNKS = {"gpipe": (1, 2, 3), "1f1b": (1,), "interleaved": (1, 2, 3), "zb-h1": (1,), "zbv": (2,)}


@given(
    name=st.sampled_from(list(CHUNKS)), num_coordinates=st.integers(1, 5), num_microbatches=st.integers(1, 6), data=st.data()
)
@settings(deadline=None, max_examples=200)
def test_a_broken_table_is_caught(name: str, num_coordinates: int, num_microbatches: int, data: st.DataObject) -> None:
    num_chunks = data.draw(st.sampled_from(CHUNKS[name]))
    schedule = schedules.SCHEDULES[name](num_coordinates, num_microbatches, num_chunks)
    coordinate = data.draw(st.integers(0, num_coordinates - 1))
    row = list(schedule.actions[coordinate])
    index = data.draw(st.integers(0, len(row) - 1))
    fault = data.draw(st.sampled_from(["drop", "duplicate", "swap"]))
    if fault == "drop":
        # The only backward of the only stage: a forward-only table would be left, which is valid.
        assume(num_coordinates * num_chunks * num_microbatches > 1 or row[index].kind is not Kind.BACKWARD)
        del row[index]
    elif fault == "duplicate":
        row.insert(index, row[index])
    else:
        # Actions may commute; a swap is a fault for certain where it breaks a message order (one kind of one stage, with
        # another coordinate beside it) or a dependency (two kinds of one stage and micro-batch).
        other = data.draw(st.integers(0, len(row) - 1))
        first, second = row[index], row[other]
        assume(first.stage == second.stage and first != second)
        neighbours = {stage for stage in (first.stage - 1, first.stage + 1) if 0 <= stage < schedule.placement.num_stages}
        travels = any(schedule.placement.coordinates[stage] != coordinate for stage in neighbours)
        same_kind = first.kind is second.kind and first.kind is not Kind.WEIGHT_GRADIENT and travels
        assume(same_kind or first.microbatch == second.microbatch)
        row[index], row[other] = second, first
    rows = tuple(tuple(row) if c == coordinate else r for c, r in enumerate(schedule.actions))
    with pytest.raises(ConfigError):
        simulate.validate(Schedule("broken", schedule.placement, num_microbatches, rows))


def _runs(schedule: Schedule) -> bool:
    """Say whether ranks that do a table's actions in order, with a queue for each channel between two of them, come to its end.

    Written apart from the validator: queues that are filled and emptied, where that one compares orders.
    """
    holders, done = schedule.placement.coordinates, set[Action]()
    queues: dict[tuple[bool, int, int], deque[tuple[int, int]]] = defaultdict(deque)
    left = [deque(row) for row in schedule.actions]

    def can_run(action: Action) -> bool:
        """Take what ``action`` needs, if it is there."""
        stage, kind, microbatch = action
        if kind is Kind.WEIGHT_GRADIENT:
            return Action(stage, Kind.INPUT_GRADIENT, microbatch) in done
        forward = kind is Kind.FORWARD
        before = stage - 1 if forward else stage + 1
        if not forward and Action(stage, Kind.FORWARD, microbatch) not in done:
            return False
        if not 0 <= before < len(holders):
            return True
        if holders[before] == holders[stage]:
            kinds = (Kind.FORWARD,) if forward else (Kind.BACKWARD, Kind.INPUT_GRADIENT)
            return any(Action(before, other, microbatch) in done for other in kinds)
        queue = queues[forward, holders[before], holders[stage]]
        if not queue or queue[0] != (stage, microbatch):  # what is first in a queue stays there until it is taken
            return False
        queue.popleft()
        return True

    progress = True
    while progress:
        progress = False
        for row in left:
            while row and can_run(row[0]):
                progress = True
                action = row.popleft()
                done.add(action)
                stage, kind, microbatch = action
                after = stage + 1 if kind is Kind.FORWARD else stage - 1
                if kind is not Kind.WEIGHT_GRADIENT and 0 <= after < len(holders) and holders[after] != holders[stage]:
                    queues[kind is Kind.FORWARD, holders[stage], holders[after]].append((after, microbatch))
    return not any(left)


@given(
    name=st.sampled_from(list(CHUNKS)), num_coordinates=st.integers(1, 4), num_microbatches=st.integers(1, 5), data=st.data()
)
@settings(deadline=None, max_examples=300)
def test_what_is_valid_is_what_runs(name: str, num_coordinates: int, num_microbatches: int, data: st.DataObject) -> None:
    """Two ranks' actions moved anywhere: the validator neither passes a table that stops nor refuses one that runs."""
    schedule = schedules.SCHEDULES[name](num_coordinates, num_microbatches, data.draw(st.sampled_from(CHUNKS[name])))
    rows = list(map(list, schedule.actions))
    for _ in range(data.draw(st.integers(0, 2))):
        row = rows[data.draw(st.integers(0, num_coordinates - 1))]
        row.insert(data.draw(st.integers(0, len(row) - 1)), row.pop(data.draw(st.integers(0, len(row) - 1))))
    moved = replace(schedule, actions=tuple(map(tuple, rows)))
    try:
        simulate.validate(moved)
        valid = True
    except ConfigError:
        valid = False
    assert valid == _runs(moved), str(moved)


@given(num_coordinates=st.integers(1, 6), num_chunks=st.integers(1, 3), num_microbatches=st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_any_generated_table_is_valid(num_coordinates: int, num_chunks: int, num_microbatches: int) -> None:
    for name in (name for name, chunks in CHUNKS.items() if num_chunks in chunks):
        schedule = schedules.SCHEDULES[name](num_coordinates, num_microbatches, num_chunks)
        simulate.validate(schedule)
        simulate.validate(schedules.forward_only(schedule))
        simulate.validate(schedules.sweep(schedule.placement, num_microbatches))
