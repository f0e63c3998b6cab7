import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lightning.config import PipelineOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline.schedules.actions import Placement
from megatron_lightning.pipeline.schedules.partition import Unit, partition_units
from megatron_lightning.pipeline.schedules.stage_layouts import parse_layout, split_units

ORACLES = Path(__file__).parents[2] / "oracles"
SPLITS, LAYOUTS = (
    json.loads((ORACLES / f"pipeline_{name}.json").read_text())["facts"]
    for name in ("layer_split", "layouts")
)
SIZES = ("num_layers", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")


def _layers(count: int) -> list[str]:
    return [f"layers.{index}" for index in range(count)]


def _counts(num_layers: int, num_stages: int) -> list[int]:
    return [len(stage) for stage in partition_units(_layers(num_layers), num_stages)]


def _model(num_layers: int, num_predicting: int = 0) -> list[str]:
    return [
        "embed",
        *_layers(num_layers),
        "norm",
        *(f"mtp.layers.{index}" for index in range(num_predicting)),
        "head",
    ]


def _numbers(stage: Sequence[str]) -> list[int]:
    return [int(name.rpartition(".")[2]) for name in stage if name.startswith("layers.")]


@pytest.mark.parametrize("fact", SPLITS, ids=lambda f: "-".join(map(str, f["args"].values())))
def test_splits_are_megatrons(fact: dict) -> None:
    """Megatron lists the layers of every chunk of every rank; chunk v of rank r is stage v * pp +
    r."""
    num_layers, pp, chunks = (fact["args"].get(name, 1) for name in SIZES)
    options = PipelineOptions(
        **{name: value for name, value in fact["args"].items() if name not in SIZES}
    )
    stages = split_units(_model(num_layers), Placement.loop(pp, chunks), options)
    assert [
        [_numbers(stages[chunk * pp + rank]) for chunk in range(chunks)] for rank in range(pp)
    ] == fact["stages"]
    assert (
        stages[0][0] == "embed"
        and stages[-1][-1] == "head"
        and sum(map(len, stages)) == num_layers + 3
    )


@pytest.mark.parametrize("fact", LAYOUTS, ids=lambda f: f"{f['layout']}-{f['pp']}")
def test_layouts_are_megatrons(fact: dict) -> None:
    options = PipelineOptions(pipeline_model_parallel_layout=fact["layout"])
    placement = Placement.loop(fact["pp"], fact.get("vpp", 1))
    units = _model(fact["num_layers"], fact.get("mtp") or 0)
    if "error" in fact:
        with pytest.raises(ConfigError):
            split_units(units, placement, options)
        return
    assert list(map(list, parse_layout(fact["layout"]))) == fact["parsed"]
    assert parse_layout(fact["parsed"]) == parse_layout(fact["layout"])
    stages = split_units(units, placement, options)
    of_ranks = [
        [_numbers(stages[chunk * fact["pp"] + rank]) for chunk in range(fact["vpp"])]
        for rank in range(fact["pp"])
    ]
    assert of_ranks == fact["decoder_ids"] and [name for stage in stages for name in stage] == units
    for stage, kinds in zip(stages, fact["parsed"], strict=True):
        assert sum(name.startswith("mtp") for name in stage) == kinds.count("mtp")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Ett|tx|L", "has 'x' where a layer belongs. Write E, t, m, L"),
        ("E(tt|L", r"has '\('"),
        ("E*t|L", r"has '\*'"),
        ("", "does not begin with its only embedding"),
        ("tt|ttL", "does not begin with its only embedding.*Write E first and once"),
        ("|EttttL", "does not begin"),
        ("EE|ttttL", "does not begin"),
        ("Ett|Ltt", "does not end with its only loss.*Write L last and once"),
        ("EttttL|", "does not end"),
        ("Ettm|tt,mL", "has m in 2 stages"),
        ("Em|ttttL", "behind the last t"),
        (
            "Ett|tt|L",
            (
                r"has 3 stages, and 2 pipeline ranks with 1 model chunks each hold 2\. Write 2 or "
                r"4 stages"
            ),
        ),
        (
            "Et|t|t|tL",
            r"has 4 stages.*Set virtual_pipeline_model_parallel_size to 2, or write 2 stages",
        ),
        ("EttttL", r"has 1 stages.*Write 2 stages"),
        ("Ett|tttL", r"has 5 layers t \(decoder\), and pipeline_units\(\) lists 4. Write 4"),
        ("Ett|ttmL", r"has 1 layers m \(mtp\), and pipeline_units\(\) lists 0"),
        (
            [["embedding", "decoder"], ["decoder", "output"]],
            "has 'output'. Use the names embedding, decoder, mtp, loss",
        ),
    ],
)
def test_wrong_layouts(layout: str | list[list[str]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_units(
            _model(4), Placement.loop(2), PipelineOptions(pipeline_model_parallel_layout=layout)
        )


def test_a_layout_is_read_stage_by_stage() -> None:
    def cut(
        layout: str, placement: Placement, units: Sequence[Unit]
    ) -> tuple[tuple[str, ...], ...]:
        return split_units(units, placement, PipelineOptions(pipeline_model_parallel_layout=layout))

    loop, heavy = (
        Placement.loop(2),
        [("embed", 3.0), ("layers.0", 5.0), ("layers.1", 0.5), ("head", 2.0)],
    )
    assert cut("E|tt L", loop, _model(2)) == (("embed",), ("layers.0", "layers.1", "norm", "head"))
    assert cut("Ett|L", loop, _model(2)) == (("embed", "layers.0", "layers.1"), ("norm", "head"))
    assert cut("E(t*2|)*2L", Placement.loop(3), _model(4))[1] == ("layers.2", "layers.3")
    assert cut("Et||(t|)*1L", Placement.v(2), _model(2)) == (
        ("embed", "layers.0"),
        (),
        ("layers.1",),
        ("norm", "head"),
    )
    assert cut("Et|tL", loop, heavy) == (("embed", "layers.0"), ("layers.1", "head"))
    assert cut("Et|t|mL", Placement.loop(3), _model(2, 1))[1:] == (
        ("layers.1", "norm"),
        ("mtp.layers.0", "head"),
    )
    with pytest.raises(
        ConfigError, match="m in stage 1, and only the last model chunks, stages 2 to 3"
    ):
        cut("Ett|m||L", Placement.loop(2, 2), _model(2, 1))


def test_uneven_ends_without_one_of_them_and_with_a_rest() -> None:
    def counts(num_layers: int, placement: Placement, **options: int) -> list[int]:
        return [
            len(_numbers(stage))
            for stage in split_units(_model(num_layers), placement, PipelineOptions(**options))
        ]

    assert counts(8, Placement.loop(3), num_layers_in_first_pipeline_stage=2) == [2, 3, 3]
    assert counts(8, Placement.loop(3), num_layers_in_last_pipeline_stage=1) == [4, 3, 1]
    assert counts(
        5,
        Placement.loop(2),
        num_layers_in_first_pipeline_stage=4,
        num_layers_in_last_pipeline_stage=1,
    ) == [4, 1]
    assert counts(9, Placement.loop(2, 2), num_layers_in_first_pipeline_stage=4) == [2, 3, 2, 2]


@pytest.mark.parametrize(
    ("options", "placement", "message"),
    [
        (
            {"num_layers_in_first_pipeline_stage": 3},
            Placement.loop(2, 2),
            "=3 cannot be divided among 2 .* Set it to 2 or 4",
        ),
        (
            {"num_layers_in_last_pipeline_stage": 1},
            Placement.loop(2, 2),
            "=1 cannot be divided among 2 .* Set it to 2",
        ),
        (
            {"num_layers_in_first_pipeline_stage": 7},
            Placement.loop(3),
            "leave 1 of 8 layers for 2 other .* 2 or more are left",
        ),
        (
            {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 3},
            Placement.loop(2),
            "leave 2 of 8 layers for 0 other .* none is left",
        ),
        (
            {"num_layers_in_first_pipeline_stage": 2},
            Placement.v(2),
            "they are one. Set pipeline_model_parallel_layout",
        ),
    ],
)
def test_uneven_ends_that_do_not_fit(
    options: dict[str, int], placement: Placement, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        split_units(_model(8), placement, PipelineOptions(**options))


def test_there_is_something_to_count() -> None:
    with pytest.raises(
        ConfigError, match=r"account_for_embedding.*lists nothing before the first layer"
    ):
        split_units(
            _layers(4),
            Placement.loop(2),
            PipelineOptions(account_for_embedding_in_pipeline_split=True),
        )
    with pytest.raises(ConfigError, match=r"account_for_loss.*lists nothing after the last layer"):
        split_units(
            _layers(4), Placement.loop(2), PipelineOptions(account_for_loss_in_pipeline_split=True)
        )


def test_options_that_contradict() -> None:
    with pytest.raises(ConfigError, match="num_layers_in_first_pipeline_stage is 0"):
        PipelineOptions(num_layers_in_first_pipeline_stage=0)
    with pytest.raises(
        ConfigError,
        match="pipeline_model_parallel_layout and account_for_loss_in_pipeline_split are set",
    ):
        PipelineOptions(
            pipeline_model_parallel_layout="EttL", account_for_loss_in_pipeline_split=True
        )


def test_units_without_weight_go_with_their_neighbours() -> None:
    units = ["embed", "dropout", *_layers(3), "norm", "head"]
    assert partition_units(units, 2) == (
        ("embed", "dropout", "layers.0", "layers.1"),
        ("layers.2", "norm", "head"),
    )
    assert partition_units(units, 1) == (tuple(units),)
    assert partition_units(["a", "b", "c"], 2) == (("a", "b"), ("c",))


def test_extra_layers_go_to_earlier_stages() -> None:
    assert (
        _counts(10, 4) == [3, 3, 2, 2] and _counts(5, 4) == [2, 1, 1, 1] and _counts(7, 2) == [4, 3]
    )


def test_weights_are_balanced() -> None:
    units = [("embed", 2.0), *_layers(6), ("head", 3.0)]
    assert partition_units(units, 3) == (
        ("embed", "layers.0", "layers.1"),
        ("layers.2", "layers.3", "layers.4", "layers.5"),
        ("head",),
    )


@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=9), num_stages=st.integers(1, 5))
@settings(deadline=None, max_examples=100)
def test_no_cut_has_a_lighter_heaviest_stage(weights: list[int], num_stages: int) -> None:
    if len(weights) < num_stages:
        return
    units = [(f"u{index}", float(weight)) for index, weight in enumerate(weights)]
    weight_of = dict(units)
    stages = partition_units(units, num_stages)
    assert [name for stage in stages for name in stage] == [name for name, _ in units] and all(
        stages
    )

    def heaviest(cuts: tuple[int, ...]) -> int:
        edges = (0, *cuts, len(weights))
        return max(sum(weights[a:b]) for a, b in pairwise(edges))

    best = min(heaviest(cuts) for cuts in combinations(range(1, len(weights)), num_stages - 1))
    assert max(sum(weight_of[name] for name in stage) for stage in stages) == best


def test_what_cannot_be_cut() -> None:
    with pytest.raises(
        ConfigError, match=r"4 pipeline stages need at least 4 layers.*lists 3 that.*to 3 or less"
    ):
        partition_units(["embed", *_layers(3), "head"], 4)
    with pytest.raises(ConfigError, match=r"'layers\.0' twice"):
        partition_units(["layers.0", "layers.0"], 2)
    with pytest.raises(ConfigError, match="'a' weighs -1"):
        partition_units([("a", -1.0), ("b", 1.0)], 1)


def test_planning_a_pipeline_needs_no_torch() -> None:
    code = (
        "import sys; from megatron_lightning.pipeline.schedules import simulate, "
        "partition;sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
