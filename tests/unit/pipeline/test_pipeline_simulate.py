"""Simulated cost of schedules: against the papers' formulas, by hand, and as the command line shows
it."""

import json
import random
import time
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from megatron_lightning.cli import main
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.pipeline import schedules
from megatron_lightning.pipeline.schedules.actions import Action, Kind, Placement, Schedule
from megatron_lightning.pipeline.schedules.description import describe_schedule
from megatron_lightning.pipeline.schedules.formulas import expected
from megatron_lightning.pipeline.schedules.picture import (
    Bar,
    Panel,
    Text,
    chrome_trace,
    draw,
    svg,
    write_png,
)
from megatron_lightning.pipeline.schedules.simulate import Costs, simulate, validate
from megatron_lightning.pipeline.schedules.trace import Executed, read_trace, trace_lines

ONE_CHUNK = ("gpipe", "1f1b", "interleaved", "zb-h1")


@given(
    name=st.sampled_from(list(schedules.SCHEDULES)),
    p=st.integers(1, 6),
    m=st.integers(1, 14),
    v=st.integers(1, 4),
    times=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    extra=st.integers(0, 3),
)
@settings(deadline=None, max_examples=250)
def test_formulas_hold(name: str, p: int, m: int, v: int, times: list[int], extra: int) -> None:
    chunks = {"1f1b": 1, "zb-h1": 1, "zbv": 2}.get(name, v)
    group = p + extra if name == "interleaved" and v > 1 and extra else None
    try:
        schedule = schedules.make_schedule(
            name, num_ranks=p, num_microbatches=m, num_chunks=chunks, microbatch_group_size=group
        )
    except ConfigError:
        assert group is not None  # a last group that is too small
        return
    if name == "zbv":
        times = times[:1] * 3
    costs = Costs(forward=times[0], input_gradient=times[1], weight_gradient=times[2])
    formula, simulation = expected(schedule, costs, group), simulate(schedule, costs)
    if formula is None:
        excluded = {"zb-h1": m < p or times[2] > min(times[:2]), "zbv": m < 2 * p - 1}
        assert (
            excluded[name]
            if name in excluded
            else group is not None and 0 < m % group < p and m > group
        )
    else:
        assert (
            simulation.step_time == formula.step_time
            and simulation.peak_in_flight == formula.peak_in_flight
        )
    work = sum(end - start for start, end in simulation.spans.values())
    assert simulation.bubble == pytest.approx(1 - work / (simulation.step_time * p))


def test_unequal_costs_by_hand() -> None:
    table = schedules.read_rows("mine", ["1F0 1F1 1B0 1B1", "0F0 0F1 0B0 0I1 0W1"])
    costs = Costs(
        forward=(1, 2),
        input_gradient=(3, 4),
        weight_gradient=(5, 6),
        communication=0.5,
        activation=(10, 7),
    )
    simulation = simulate(table, costs)
    assert {str(action): span for action, span in simulation.spans.items()} == {
        "0F0": (0, 1), "0F1": (1, 2), "1F0": (1.5, 3.5), "1F1": (3.5, 5.5), "1B0": (5.5, 15.5),
        "1B1": (15.5, 25.5),
        "0B0": (16, 24), "0I1": (26, 29), "0W1": (29, 34),
    }  # fmt: skip
    assert simulation.step_time == 34 and simulation.bubble == pytest.approx(1 - (24 + 18) / 68)
    assert simulation.peak_in_flight == (2, 2) and simulation.peak_activations == (14, 20)
    assert expected(table, costs) is None
    whole = simulate(table, Costs(backward=1.0))
    assert whole.spans[Action.parse("1B0")] == (3.0, 4.0)


def test_costs_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"cost forward has 3 numbers, and there are 2 stages"):
        simulate(schedules.one_f_one_b(2, 2), Costs(forward=(1, 2, 3)))
    with pytest.raises(ConfigError, match=r"cost communication is -1"):
        Costs(communication=-1)
    with pytest.raises(ConfigError, match=r"cost forward is \(1\.0, nan\)"):
        Costs(forward=(1.0, float("nan")))


@pytest.mark.parametrize("name", ["interleaved", "gpipe"])
def test_a_large_table_is_proven_in_half_a_second(name: str) -> None:
    schedule = schedules.make_schedule(name, num_ranks=16, num_chunks=4, num_microbatches=128)
    assert sum(map(len, schedule.actions)) == 16_384
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        validate(schedule)
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.5


def _panels() -> list[Panel]:
    tables = [schedules.zbv(3, 6), schedules.one_f_one_b(3, 6)]
    return [
        Panel(f"{table.name} & <co>", table.placement, simulate(table).spans) for table in tables
    ]


def test_the_picture_shows_every_action(tmp_path: Path) -> None:
    panels = _panels()
    scene = draw(panels, " ms")
    labels = [
        shape
        for shape in scene.shapes
        if isinstance(shape, Text) and shape.anchor == "middle" and shape.size > 10
    ]
    assert sorted(label.text for label in labels) == sorted(
        str(a.microbatch) for panel in panels for a in panel.spans
    )
    boxes = [shape for shape in scene.shapes if isinstance(shape, Bar)]
    assert all(
        box.x >= 0 and box.x + box.width <= scene.width and box.y + box.height <= scene.height
        for box in boxes
    )
    assert len({box.fill for box in boxes}) >= 2 * 3  # two chunks in three shades
    drawn = sorted(
        (box.y, box.x, box.width) for box in boxes if box.height > 20 and box.fill != "#f4f4f4"
    )
    assert len(drawn) == sum(len(panel.spans) for panel in panels)
    assert all(
        x + width <= next_x for (y, x, width), (next_y, next_x, _) in pairwise(drawn) if y == next_y
    )
    root = ElementTree.fromstring(svg(scene))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "zbv & <co>" in texts and "stage 1, 4" in texts and "weight gradient" in texts
    write_png(scene, tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as image:
        assert (
            image.width == pytest.approx(2 * scene.width, abs=2)
            and len(image.getcolors(1 << 20) or ()) > 20
        )


def test_a_picture_of_many_actions_stays_a_picture() -> None:
    table = schedules.make_schedule("interleaved", num_ranks=8, num_chunks=4, num_microbatches=128)
    scene = draw([Panel("many", table.placement, simulate(table).spans)])
    assert scene.width < 6200


def test_chrome_reads_the_trace() -> None:
    panels = _panels()
    events = json.loads(chrome_trace(panels))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == sum(len(panel.spans) for panel in panels)
    first = next(event for event in spans if event["name"] == "0F0" and event["pid"] == 1)
    # One unit is a millisecond; stage 0 is on pp rank 2.
    assert (first["ts"], first["dur"], first["tid"]) == (0, 1000, 2)
    assert {"process_name", "thread_name"} == {
        event["name"] for event in events if event["ph"] == "M"
    }


def test_the_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--ranks",
        "8",
        "--chunks",
        "2",
        "--microbatches",
        "16",
        "--schedule",
        "zbv",
        "--output",
        str(tmp_path / "new"),
    ]
    main(["schedule", *options])
    out = capsys.readouterr().out
    assert "schedule zbv (it was asked for): 8 pipeline ranks x 2 chunks, 16 micro-batches" in out
    assert (
        "pp rank 7: 7F0 8F0 7F1" in out
        and "6.8%     6.8%" in out
        and "2 M (F + I + W) + (P - 1) F" in out
    )
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        f"schedule-zbv-p8-c2-m16{suffix}" for suffix in (".png", ".svg", ".trace.json")
    ]


def test_the_command_writes_only_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [
        describe_schedule(ranks=2, microbatches=4, compare=compare) for compare in (False, True)
    ]
    assert not list(tmp_path.iterdir()) and not any("written" in text for text in texts)


def test_the_command_compares(tmp_path: Path) -> None:
    lines = describe_schedule(
        ranks=4, microbatches=8, compare=True, output=str(tmp_path)
    ).splitlines()
    table = {cells[0]: cells[1:] for line in lines[3:8] if (cells := line.split())}
    assert list(table) == ["zbv", "zb-h1", "interleaved", "gpipe", "1f1b"]
    assert table["interleaved"] == ["2", "28.5", "15.8%", "15.8%", "5.5", "112"]
    assert table["1f1b"] == ["1", "33", "27.3%", "27.3%", "4", "48"]
    assert len(list(tmp_path.iterdir())) == 3


def test_the_command_compares_a_table_of_ones_own_and_any_group_size(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(schedules.write_csv(schedules.zbv(2, 6)))
    text = describe_schedule(
        ranks=2,
        microbatches=6,
        chunks=2,
        schedule=str(tmp_path / "mine.csv"),
        microbatch_group_size=6,
        compare=True,
    )
    rows = {cells[0]: cells[1:] for line in text.splitlines()[3:9] if (cells := line.split())}
    assert rows["mine.csv"][:2] == rows["zbv"][:2] == ["2", "18.5"] and rows["mine.csv"][3] == "-"
    # 2 (P - 1) + (V - 1) N + 1 = 9 halves.
    assert rows["interleaved"] == ["2", "19.5", "7.7%", "7.7%", "4.5", "36"]


@pytest.mark.parametrize(
    ("m", "slots", "count"), [(16, "MV + P - 1", 35), (4, "MV + P - 1", 11), (3, "PV + M - 1", 10)]
)
def test_the_formula_that_is_shown_is_the_one_that_is_computed(
    m: int, slots: str, count: int
) -> None:
    formula = expected(schedules.interleaved(4, m, 2), Costs())
    assert (
        formula is not None
        and formula.formula == f"({slots}) (F + B)"
        and formula.step_time == 3 * count
    )


def test_the_command_takes_costs() -> None:
    text = describe_schedule(
        ranks=2, microbatches=4, forward=(1.0, 2.0), input_gradient=(2.0,), communication=0.5
    )
    assert (
        "There is no formula" in text
        and "(each of the 2 pipeline ranks holds one model chunk)" in text
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "ranks is None and microbatches is None.*--trace"),
        ({"ranks": 0, "microbatches": 4}, "ranks=0, microbatches=4 and chunks=1: set each to 1"),
        ({"ranks": 2, "microbatches": 0}, "ranks=2, microbatches=0 and chunks=1"),
        ({"ranks": 2, "microbatches": 4, "schedule": "zbv"}, "two model chunks.*there are 1"),
        (
            {"ranks": 2, "microbatches": 4, "forward": (1.0, 2.0, 3.0)},
            "3 numbers, and there are 2 stages",
        ),
        ({"trace": "/no/such/place"}, r"no trace \(\*.jsonl\) in /no/such/place"),
        (
            {"ranks": 2, "microbatches": 4, "output": "/dev/null"},
            "output is /dev/null, where the picture cannot be written",
        ),
    ],
)
def test_the_command_says_what_is_wrong(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe_schedule(**options)


def _write_traces(
    directory: Path, schedule: Schedule, stretch: float, ranks_of: dict[int, int]
) -> None:
    """Write what ranks would record if every action took as long as simulated and the step
    ``stretch`` times as long."""
    spans = simulate(
        schedule, Costs(forward=0.001, input_gradient=0.002, weight_gradient=0.001)
    ).spans
    for rank, pp_rank in ranks_of.items():
        row = [
            Executed(
                rank, a, 5 + stretch * spans[a][0], 5 + stretch * spans[a][0] + _length(spans[a])
            )
            for a in schedule.actions[pp_rank]
        ]
        random.Random(rank).shuffle(row)
        (directory / f"rank{rank}.jsonl").write_text(trace_lines(row))


def _length(span: tuple[float, float]) -> float:
    return span[1] - span[0]


def test_an_executed_step_is_laid_beside_the_simulated(tmp_path: Path) -> None:
    schedule = schedules.interleaved(2, 4, 2)
    _write_traces(tmp_path, schedule, 1.1, {0: 0, 1: 0, 4: 1, 5: 1})
    timeline = read_trace(str(tmp_path))
    assert timeline.schedule.actions == schedule.actions and timeline.ranks == (0, 4)
    assert timeline.schedule.placement == Placement.loop(
        2, 2
    ) and timeline.costs().forward == pytest.approx((0.001,) * 4)
    simulation = simulate(schedule, Costs(forward=1, input_gradient=2, weight_gradient=1))
    text = describe_schedule(trace=str(tmp_path), output=str(tmp_path / "out"))
    line = next(line for line in text.splitlines() if line.startswith("step time"))
    executed, simulated = map(float, line.split()[-2:])
    assert (
        simulated == pytest.approx(simulation.step_time, rel=1e-4)
        and 1.05 < executed / simulated < 1.1
    )
    assert (
        "idle time of pp rank 1 (rank 4)" in text and (tmp_path / "out" / "executed.png").exists()
    )


def test_wrong_traces(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(DataError, match="are empty"):
        read_trace(str(tmp_path))
    good = trace_lines([Executed(0, Action(1, Kind.FORWARD, 0), 0.0, 1.0)])
    (tmp_path / "a.jsonl").write_text(good + '{"rank": 0}\n')
    with pytest.raises(
        DataError, match=r"a.jsonl, line 2, is no executed action \(KeyError\('stage'\)\)"
    ):
        read_trace(str(tmp_path))
    (tmp_path / "a.jsonl").write_text(good)
    with pytest.raises(DataError, match=r"of the stages 1 only. Copy the files of all ranks"):
        read_trace(str(tmp_path))
    (tmp_path / "b.jsonl").write_text(
        trace_lines([Executed(1, Action(0, Kind.FORWARD, 0), 0.0, 1.0)])
    )
    read_trace(str(tmp_path))
    (tmp_path / "c.jsonl").write_text(
        trace_lines([Executed(2, Action(2, Kind.FORWARD, 0), 0.0, 1.0)])
    )
    with pytest.raises(DataError, match="not of one pipeline: placement"):
        read_trace(str(tmp_path))
