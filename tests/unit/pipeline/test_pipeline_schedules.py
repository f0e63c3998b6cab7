import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline import schedules
from megatron_lightning.pipeline.schedules import simulate
from megatron_lightning.pipeline.schedules.actions import Action, Kind, Placement

ORACLE = json.loads(
    (Path(__file__).parents[2] / "oracles" / "pipeline_schedules.json").read_text()
)["facts"]


@pytest.mark.parametrize("text", ["0F0", "2B10", "1I3", "12W0"])
def test_actions_have_a_text_form(text: str) -> None:
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "0X1", "0F", "-1F0", "0F0 1F0"])
def test_text_that_is_no_action(text: str) -> None:
    with pytest.raises(ConfigError, match=r"not a pipeline action.*such as 2F0"):
        Action.parse(text)


def test_the_last_stage_is_on_pp_rank_0() -> None:
    assert Placement.loop(4).pp_ranks == (3, 2, 1, 0)
    assert Placement.loop(2, 3).pp_ranks == (1, 0, 1, 0, 1, 0)
    assert Placement.v(2).pp_ranks == (0, 1, 1, 0)
    assert Placement.v(3).stages_of(1) == (1, 4) and Placement.loop(3, 2).stages_of(0) == (2, 5)
    with pytest.raises(ConfigError, match="last stage on pp rank 0"):
        Placement((0, 1))
    with pytest.raises(ConfigError, match="without a stage"):
        Placement((2, 0))


def test_1f1b_reads_as_in_the_paper() -> None:
    assert str(schedules.make_schedule("1f1b", num_ranks=3, num_microbatches=4)) == (
        "0: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3\n1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n2: 0F0 0F1 0F2 "
        "0B0 0F3 0B1 0B2 0B3"
    )


@pytest.mark.parametrize(
    "fact",
    [f for f in ORACLE if f["vpp"] is None],
    ids=lambda f: f"pp{f['pp']}-m{f['num_microbatches']}",
)
def test_1f1b_is_megatrons(fact: dict) -> None:
    """Megatron lists chunk + 1 for a forward and its negative for a backward; its rank is our
    stage."""
    schedule = schedules.one_f_one_b(fact["pp"], fact["num_microbatches"])
    for stage, rank in enumerate(fact["ranks"]):
        row = schedule.actions[schedule.placement.pp_ranks[stage]]
        assert [1 if action.kind is Kind.FORWARD else -1 for action in row] == rank["order"]
        assert [action.kind for action in row].index(Kind.BACKWARD) == rank["warmup"] + (
            rank["remaining"] > 0
        )


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8, 16])
def test_bubble_and_memory_follow_the_formulas(num_ranks: int, num_microbatches: int) -> None:
    bubble = (num_ranks - 1) / (num_microbatches + num_ranks - 1)
    for name in ("gpipe", "1f1b"):
        schedule = schedules.make_schedule(
            name, num_ranks=num_ranks, num_microbatches=num_microbatches
        )
        simulate.validate(schedule)
        simulate.validate(schedules.forward_only(schedule))
        report = simulate.simulate(schedule)
        assert report.bubble == pytest.approx(bubble)
        assert report.step_time == 3 * (num_microbatches + num_ranks - 1)
        held = [
            num_microbatches if name == "gpipe" else min(num_microbatches, c + 1)
            for c in range(num_ranks)
        ]
        assert list(report.peak_in_flight) == held


def test_names_resolve_and_unknown_ones_list_the_known() -> None:
    assert (
        str(schedules.resolve("auto", num_ranks=1))
        == "1f1b (the one pipeline rank holds one model chunk)"
    )
    assert (
        str(schedules.resolve("auto", num_ranks=4))
        == "1f1b (each of the 4 pipeline ranks holds one model chunk)"
    )
    several = schedules.resolve("auto", num_ranks=4, num_chunks=2)
    assert str(several) == "interleaved (each of the 4 pipeline ranks holds 2 model chunks)"
    assert several.placement == Placement.loop(4, 2) and several.table(6).num_microbatches == 6
    with pytest.raises(
        ConfigError, match=r"'pipedream'.*auto, gpipe, 1f1b, interleaved, zb-h1, zbv"
    ):
        schedules.make_schedule("pipedream", num_ranks=2, num_microbatches=2)
    with pytest.raises(ConfigError, match="num_microbatches is 0"):
        schedules.make_schedule("1f1b", num_ranks=2, num_microbatches=0)
    with pytest.raises(ConfigError, match=r"one model chunk.*there are 2.*interleaved.*gpipe"):
        schedules.make_schedule("1f1b", num_ranks=2, num_microbatches=2, num_chunks=2)
    with pytest.raises(
        ConfigError, match=r"zb-h1 runs one model chunk.*there are 2.*size to 1.*zbv"
    ):
        schedules.make_schedule("zb-h1", num_ranks=2, num_microbatches=2, num_chunks=2)
    with pytest.raises(ConfigError, match=r"zbv runs two model chunks.*there are 3.*size to 2"):
        schedules.make_schedule("zbv", num_ranks=2, num_microbatches=2, num_chunks=3)
    with pytest.raises(ConfigError, match="num_chunks is 0"):
        schedules.make_schedule("1f1b", num_ranks=2, num_microbatches=2, num_chunks=0)
    with pytest.raises(
        ConfigError,
        match=r"microbatch_group_size_per_vp_stage is 4, and schedule 1f1b.*interleaved",
    ):
        schedules.resolve("1f1b", num_ranks=2, microbatch_group_size=4)
    with pytest.raises(
        ConfigError, match=r"microbatch_group_size_per_vp_stage is 4.*nothing to group"
    ):
        schedules.resolve("interleaved", num_ranks=2, microbatch_group_size=4)


@pytest.mark.parametrize(
    "fact", [f for f in ORACLE if f["vpp"]], ids=lambda f: "-".join(map(str, list(f.values())[:4]))
)
def test_interleaved_is_megatrons(fact: dict) -> None:
    """Megatron's rank is our stage modulo the ranks; its order lists chunk + 1, negative for a
    backward."""
    pp, group = fact["pp"], fact["microbatch_group_size_per_vp_stage"]
    schedule = schedules.interleaved(pp, fact["num_microbatches"], fact["vpp"], group)
    simulate.validate(schedule)
    visits = list(zip(fact["virtual_table_microbatch"], fact["virtual_table_chunk"], strict=True))
    for rank, expected in enumerate(fact["ranks"]):
        row = schedule.actions[pp - 1 - rank]
        assert [(a.microbatch, a.stage // pp) for a in row if a.kind is Kind.FORWARD] == visits
        assert [
            (a.microbatch, fact["vpp"] - 1 - a.stage // pp) for a in row if a.kind is Kind.BACKWARD
        ] == visits
        first_backward = next(
            position for position, action in enumerate(row) if action.kind is Kind.BACKWARD
        )
        assert first_backward == expected["warmup"] + (not expected["all_in_warmup"])
        if "order" in expected:
            chunks = [action.stage // pp + 1 for action in row]
            signs = [1 if action.kind is Kind.FORWARD else -1 for action in row]
            assert [sign * chunk for sign, chunk in zip(signs, chunks, strict=True)] == expected[
                "order"
            ]


@pytest.mark.parametrize(
    ("num_microbatches", "group", "message"),
    [
        (8, 3, r"is 3, below the 4 pipeline ranks.*Set it to 4 or more"),
        (
            9,
            4,
            r"9 micro-batches.*stage=4 leave a last group of 1.*stage to 5 or 9, or run 8 or 12",
        ),
    ],
)
def test_groups_that_do_not_fit_are_named(num_microbatches: int, group: int, message: str) -> None:
    sizes = {"num_ranks": 4, "num_chunks": 3, "num_microbatches": num_microbatches}
    with pytest.raises(ConfigError, match=message):
        schedules.make_schedule("interleaved", **sizes, microbatch_group_size=group)
    # The group size it chooses itself always fits.
    simulate.validate(schedules.make_schedule("interleaved", **sizes))


def _torchs(kind: type, pp: int, chunks: int, num_microbatches: int) -> list[list[str]]:
    """Return the compute actions of one of PyTorch's schedules, by its own rank."""
    v_placed = kind.__name__ == "ScheduleZBVZeroBubble"
    others = [
        [rank, 2 * pp - 1 - rank] if v_placed else [rank + chunk * pp for chunk in range(chunks)]
        for rank in range(pp)
    ]
    shared = {
        "submod": None,
        "group": None,
        "group_size": pp,
        "group_rank": 0,
        "num_stages": pp * chunks,
        "has_backward": True,
    }
    ends = {"is_first": False, "is_last": False, "stage_index_to_group_rank": {}}
    stages = [SimpleNamespace(**shared, **ends, stage_index=index) for index in others[0]]
    schedule = kind(stages, num_microbatches, loss_fn=torch.nn.functional.mse_loss)
    return [
        [str(action) for action in schedule.pipeline_order[rank] if action is not None]
        for rank in range(pp)
    ]


@pytest.mark.parametrize(
    ("pp", "chunks", "num_microbatches"),
    [(2, 2, 4), (2, 4, 6), (4, 2, 8), (4, 2, 6), (4, 3, 12), (8, 2, 16)],
)
def test_interleaved_is_torchs(pp: int, chunks: int, num_microbatches: int) -> None:
    rounds = max(1, num_microbatches // pp)
    ours = schedules.interleaved(pp, num_microbatches, chunks, num_microbatches // rounds)
    theirs = _torchs(ScheduleInterleaved1F1B, pp, chunks, num_microbatches)
    assert [list(map(str, row)) for row in reversed(ours.actions)] == theirs
    assert schedules.read_rows("torch", [" ".join(row) for row in theirs]).actions == ours.actions


@pytest.mark.parametrize(
    ("pp", "num_microbatches"), [(2, 1), (2, 4), (3, 7), (4, 2), (4, 8), (8, 16), (8, 5)]
)
def test_zbv_is_torchs(pp: int, num_microbatches: int) -> None:
    ours = schedules.zbv(pp, num_microbatches)
    assert [list(map(str, row)) for row in ours.actions] == _torchs(
        ScheduleZBVZeroBubble, pp, 2, num_microbatches
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_zero_bubble_has_a_third_of_the_bubble_in_the_same_memory(num_ranks: int) -> None:
    """F, I and W take one tick each; a chunk of zbv is half of a stage of the others."""
    for num_microbatches in (2 * num_ranks - 1, 2 * num_ranks + 3):
        for name, chunks in (("zb-h1", 1), ("zbv", 2)):
            schedule = schedules.make_schedule(
                name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=chunks
            )
            report = simulate.simulate(schedule)
            assert report.step_time == 3 * chunks * num_microbatches + num_ranks - 1
            assert max(report.peak_in_flight) == chunks * num_ranks


@pytest.mark.parametrize("num_chunks", [2, 3])
def test_gpipe_runs_several_chunks(num_chunks: int) -> None:
    simulate.validate(
        schedules.make_schedule("gpipe", num_ranks=3, num_microbatches=4, num_chunks=num_chunks)
    )
