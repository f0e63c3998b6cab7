"""Rank arithmetic against the process groups that megatron-core builds, and the errors of sizes
that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel import ParallelLayout, RankGrid
from megatron_lightning.parallel.grid.grid import divided

ORACLES = Path(__file__).parents[2] / "oracles"
GROUPS = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp-cp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "MODEL_PARALLEL_GROUP": "tp-pp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp-dp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp-dp-cp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp-cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "etp-ep",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "etp-ep-pp",
    "EXPERT_DATA_PARALLEL_GROUP": "edp",
}
COORDINATES = {
    "tensor_model_parallel": "tp",
    "context_parallel": "cp",
    "data_parallel": "dp",
    "expert_model_parallel": "ep",
    "expert_tensor_parallel": "etp",
    "expert_data_parallel": "edp",
}
# No sizes of the grid. tests/distributed/test_context.py divides groups into instances.
INSTANCES, LEVELS = "num_distributed_optimizer_instances", "hierarchical_context_parallel_sizes"


def _facts() -> list[Any]:
    facts = [
        f
        for name in ("w8", "w16")
        for f in json.loads((ORACLES / f"process_groups_{name}.json").read_text())["facts"]
    ]
    return [
        pytest.param(f, id=f"{f['world']}-{'-'.join(f'{k[:6]}{v}' for k, v in f['args'].items())}")
        for f in facts
    ]


@pytest.mark.parametrize("fact", _facts())
def test_groups_equal_megatron_core(fact: dict[str, Any]) -> None:
    if "error" in fact:
        with pytest.raises(ConfigError, match=r"\d+.*[Ss]et|Put pp last"):
            RankGrid(ParallelLayout(**fact["args"]), fact["world"])
        return
    grid = RankGrid(
        ParallelLayout(**{k: v for k, v in fact["args"].items() if k not in (INSTANCES, LEVELS)}),
        fact["world"],
    )

    def theirs(name: str) -> set[tuple[int, ...]]:
        groups = fact["groups"].get(name) or fact["groups"][fact["same_as"][name]]
        return {tuple(sorted(group)) for group in groups}

    compared = 0
    for name, axes in GROUPS.items():
        if name in fact["groups"] or name in fact["same_as"]:
            assert {tuple(sorted(group)) for group in grid.groups(axes)} == theirs(name), name
            compared += 1
    assert compared >= len(GROUPS) - 1
    if LEVELS in fact["args"]:
        groups = [grid.group_of(rank, "cp") for rank in range(fact["world"])]
        levels = [
            divided(group, group.index(rank), fact["args"][LEVELS][1])
            for rank, group in enumerate(groups)
        ]
        for number in (0, 1):
            found = {level[number] for level in levels}
            assert found == theirs(f"HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L{number}")
    first_stages = [rank for rank in range(fact["world"]) if grid.coordinate(rank, "pp") == 0]
    assert {grid.embedding_group_of(rank) for rank in first_stages} == theirs("EMBEDDING_GROUP")
    for rank, coordinates in fact["coords"].items():
        for name, axis in COORDINATES.items():
            if isinstance(coordinates[name], list):
                assert [grid.coordinate(int(rank), axis), grid.size(axis)] == coordinates[name], (
                    name
                )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor_model_parallel_size": 0}, r"tensor_model_parallel_size is 0.*positive integer"),
        ({"pipeline_model_parallel_size": 1.5}, r"pipeline_model_parallel_size is 1\.5"),
        (
            {"sequence_parallel": True},
            r"sequence_parallel is True with tensor_model_parallel_size=1",
        ),
        (
            {"virtual_pipeline_model_parallel_size": 2},
            r"virtual_pipeline_model_parallel_size=2 needs a pipeline",
        ),
        ({"order": "tp-dp"}, r"order is 'tp-dp'.*each of tp, cp, ep, dp, pp once"),
    ],
)
def test_sizes_that_contradict_themselves(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelLayout(**sizes)


def test_a_world_that_does_not_fit_names_the_numbers() -> None:
    with pytest.raises(
        ConfigError,
        match=r"6 ranks .*replicas of 4 ranks \(tensor 2 x context 1 x pipeline 2\).*multiple of 4",
    ):
        RankGrid(ParallelLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), 6)


def test_pipelines_of_which_experts_have_others_are_refused() -> None:
    layout = ParallelLayout(
        tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1,
        pipeline_model_parallel_size=2, order="tp-pp-cp-ep-dp",
    )  # fmt: skip
    with pytest.raises(
        ConfigError,
        match=r"dense layers pipelines of ranks 2 apart and experts of ranks 1 apart. Put pp last",
    ):
        RankGrid(layout, 8)


def test_a_group_has_axes_of_one_grid() -> None:
    grid = RankGrid(ParallelLayout(expert_model_parallel_size=2), 2)
    assert grid.group_of(1, "ep") == grid.group_of(1, "dp") == (0, 1)
    for axes in ("tp-ep", "dp-edp", "expert"):
        with pytest.raises(
            ConfigError,
            match=f"no group '{axes}': dense axes are tp, cp, dp, pp, axes of experts etp, ep, edp",
        ):
            grid.size(axes)


def test_neighbors_exchange_and_groups_of_them_are_a_ring() -> None:
    ranks = (0, 2, 4, 6, 8, 10, 12, 14)  # tp 2, cp 8
    assert divided(ranks, 5, 2) == ((8, 10, 12, 14), (2, 10))
    assert divided(ranks, 5, 4) == ((8, 10), (2, 6, 10, 14))
    assert divided(ranks, 5, 1) == (ranks, (10,)) and divided(ranks, 5, 8) == ((10,), ranks)
