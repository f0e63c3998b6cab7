"""Schedules of a user's own: a CSV file, rows of actions, or a function; and what is said of
mistakes in them."""

import pickle
from pathlib import Path

import pytest

from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline import schedules
from megatron_lightning.pipeline.schedules import simulate
from megatron_lightning.pipeline.schedules.actions import Action, Kind, Placement, Schedule

OWN = """1F0, ,1F1,,1B0,1B1
0F0,0F1,,0B0,0I1,0W1
"""


def make_own(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """A user's function: 1F1B whose last rank computes weight gradients apart."""
    schedule = schedules.one_f_one_b(num_ranks, num_microbatches, num_chunks)
    split = {
        Kind.FORWARD: (Kind.FORWARD,),
        Kind.BACKWARD: (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT),
    }
    last = tuple(
        action._replace(kind=kind) for action in schedule.actions[0] for kind in split[action.kind]
    )
    return Schedule("own", schedule.placement, num_microbatches, (last, *schedule.actions[1:]))


def deadlocked(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    schedule = schedules.one_f_one_b(num_ranks, num_microbatches, num_chunks)
    return Schedule(
        "own", schedule.placement, num_microbatches, tuple(row[::-1] for row in schedule.actions)
    )


def failing(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    raise ZeroDivisionError("division by zero")


def of_words(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    return Schedule("own", Placement.loop(2), 1, (("1F0", "1B0"), ("0F0", "0B0")))  # type: ignore[arg-type]


def of_text_kinds(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    rows = tuple((Action(s, "F", 0), Action(s, "B", 0)) for s in (1, 0))  # type: ignore[arg-type]
    return Schedule("own", Placement.loop(2), 1, rows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "1F0,1B0\n\n0F0,0x0\n",
            r"schedule mine\.csv, line 3: '0x0' is not a pipeline action; write",
        ),
        ("1F0,1B0\n\n0F0,1F1,0B0\n", r"schedule mine\.csv has stage 1 in line 1 and in line 3"),
        ("", r"mine\.csv has the stages none"),
        (
            "1F0,\0",
            r"mine\.csv', which cannot be read as a CSV file|line 1: '.*' is not a pipeline action",
        ),
    ],
)
def test_mistakes_in_a_file_are_told_by_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        schedules.resolve(str(path), num_ranks=2)


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(OWN)
    choice = schedules.resolve(str(path), num_ranks=2)
    assert choice.name == "mine.csv" and choice.placement == Placement.loop(2)
    assert str(choice.table(2)) == "0: 1F0 1F1 1B0 1B1\n1: 0F0 0F1 0B0 0I1 0W1"
    assert (
        schedules.read_rows("again", schedules.write_csv(choice.table(2)).splitlines()).actions
        == choice.table(2).actions
    )
    assert str(choice.forward_table(2)) == "0: 1F0 1F1\n1: 0F0 0F1"
    simulate.validate(choice.forward_table(5))
    simulate.validate(choice.table_or_sweep(5))
    assert choice.table_or_sweep(2) == choice.table(2) and choice.splits_backward
    assert schedules.resolve(
        "interleaved", num_ranks=4, num_chunks=3, microbatch_group_size=11
    ).table(11)
    with pytest.raises(
        ConfigError,
        match=(
            r"mine.csv is a table for 2 micro-batches, and the run has 3.* a batch has 2 "
            r"micro-batches"
        ),
    ):
        choice.table(3)
    with pytest.raises(
        ConfigError,
        match=(
            r"mine.csv is a table for 2 pipeline ranks, and the run has "
            r"4.*pipeline_model_parallel_size to 2"
        ),
    ):
        schedules.resolve(str(path), num_ranks=4)
    # The first stage on the first row: reversed.
    rows = schedules.resolve(["0F0 0B0", "1F0 1B0"], num_ranks=2)
    assert (
        str(rows.table(1)) == "0: 1F0 1B0\n1: 0F0 0B0" and pickle.loads(pickle.dumps(rows)) == rows
    )


def test_a_function_of_ones_own() -> None:
    choice = schedules.resolve(f"{__name__}.make_own", num_ranks=2)
    assert choice.name.endswith("make_own") and str(choice.table(1)) == "0: 1F0 1I0 1W0\n1: 0F0 0B0"
    assert pickle.loads(pickle.dumps(choice)) == choice
    simulate.validate(choice.forward_table(3))
    with pytest.raises(ConfigError, match=r"deadlocks: pp rank 0 waits at"):
        schedules.resolve(f"{__name__}.deadlocked", num_ranks=2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no/such/table.csv", r"'no/such/table\.csv', which cannot be read"),
        ("no_such_package.make", r"'no_such_package\.make', which cannot be imported"),
        (f"{__name__}.nothing", r"cannot be imported.*nothing"),
        (f"{__name__}.OWN", r"a str\. Set it to a function"),
        ("pathlib.Path.cwd", r"cannot be imported"),
        ("..make", r"'\.\.make', which cannot be imported"),
        (
            "os.getcwd",
            r"os\.getcwd, called with num_ranks=2, .* raised TypeError: .*takes no arguments",
        ),
        (
            "builtins.max",
            (
                r"max, called with num_ranks=2, num_microbatches=2, num_chunks=1, returned int\. "
                r"Return a Schedule"
            ),
        ),
        (
            f"{__name__}.failing",
            (
                r"failing, called with num_ranks=2, num_microbatches=2, num_chunks=1, raised "
                r"ZeroDivisionError: .*Return a"
            ),
        ),
        (
            f"{__name__}.of_words",
            (
                r"of_words, called .* returned a Schedule with '1F0' among its actions\. Write "
                r"Action\("
            ),
        ),
        (
            f"{__name__}.of_text_kinds",
            r"of_text_kinds, called .* with Action\(stage=1, kind='F', microbatch=0\) among",
        ),
        ([], r"has the stages none"),
        (["1F0 1B0", ""], r"no action in row 2"),
        (["1F0 1B0", "0F0 1B0"], r"has stage 1 in row 1 and in row 2"),
        (["2F0 2B0", "0F0 0B0"], r"has the stages 0, 2\. Number them"),
        (
            ["0F0 0B0", "2F0 2B0", "1F0 1B0"],
            r"has the last stage, 2, in row 2, .* Put it into row 1 \(or row 3: the rows are",
        ),
        (["1F0 1B0", "0F0 0b0"], r"schedule table, row 2: '0b0' is not a pipeline action"),
        (["1F0", "0F0"], r"has no backwards"),
        (["1F0 1B0", "0F0"], r"stage 0, micro-batch 0 the actions F"),
    ],
)
def test_wrong_tables_of_ones_own(spec: str | list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schedules.resolve(spec, num_ranks=2)
