import json
import subprocess
import sys
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lightning.errors import ConfigError
from megatron_lightning.pipeline.partition import partition_units

ORACLE = json.loads((Path(__file__).parents[1] / "oracles" / "pipeline_layer_split.json").read_text())["facts"]
KNOWN_ARGS = {"num_layers", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"}
COUNTED = {"account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"}


def _layers(count: int) -> list[str]:
    return [f"layers.{index}" for index in range(count)]


def _counts(num_layers: int, num_stages: int) -> list[int]:
    return [len(stage) for stage in partition_units(_layers(num_layers), num_stages)]


@pytest.mark.parametrize("fact", [f for f in ORACLE if set(f["args"]) <= KNOWN_ARGS | COUNTED], ids=lambda f: str(f["args"]))
def test_splits_are_megatrons(fact: dict) -> None:
    """Megatron lists the layers of every chunk of every rank; chunk v of rank r is stage v * pp + r."""
    args = fact["args"]
    pp, chunks = args["pipeline_model_parallel_size"], args.get("virtual_pipeline_model_parallel_size", 1)
    units = [
        ("embed", float("account_for_embedding_in_pipeline_split" in args)),
        *((name, 1.0) for name in _layers(args["num_layers"])),
        ("head", float("account_for_loss_in_pipeline_split" in args)),
    ]
    stages = partition_units(units, pp * chunks)
    for rank, of_rank in enumerate(fact["stages"]):
        for chunk, expected in enumerate(of_rank):
            names = [name for name in stages[chunk * pp + rank] if name.startswith("layers")]
            assert names == [f"layers.{index}" for index in expected]


def test_units_without_weight_go_with_their_neighbours() -> None:
    units = ["embed", "dropout", *_layers(3), "norm", "head"]
    assert partition_units(units, 2) == (("embed", "dropout", "layers.0", "layers.1"), ("layers.2", "norm", "head"))
    assert partition_units(units, 1) == (tuple(units),)
    assert partition_units(["a", "b", "c"], 2) == (("a", "b"), ("c",))


def test_extra_layers_go_to_earlier_stages() -> None:
    assert _counts(10, 4) == [3, 3, 2, 2] and _counts(5, 4) == [2, 1, 1, 1] and _counts(7, 2) == [4, 3]


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
    assert [name for stage in stages for name in stage] == [name for name, _ in units] and all(stages)

    def heaviest(cuts: tuple[int, ...]) -> int:
        edges = (0, *cuts, len(weights))
        return max(sum(weights[a:b]) for a, b in pairwise(edges))

    best = min(heaviest(cuts) for cuts in combinations(range(1, len(weights)), num_stages - 1))
    assert max(sum(weight_of[name] for name in stage) for stage in stages) == best


def test_what_cannot_be_cut() -> None:
    with pytest.raises(ConfigError, match=r"4 pipeline stages need at least 4 layers.*lists 3 that.*to 3 or less"):
        partition_units(["embed", *_layers(3), "head"], 4)
    with pytest.raises(ConfigError, match=r"'layers\.0' twice"):
        partition_units(["layers.0", "layers.0"], 2)
    with pytest.raises(ConfigError, match="'a' weighs -1"):
        partition_units([("a", -1.0), ("b", 1.0)], 1)


def test_planning_a_pipeline_needs_no_torch() -> None:
    code = (
        "import sys; from megatron_lightning.pipeline import schedules, simulate, partition, Placement, partition_units;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
