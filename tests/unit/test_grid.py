"""Rank arithmetic against the process groups that megatron-core builds, and the errors of sizes that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel import ParallelLayout, RankGrid

ORACLES = Path(__file__).parent.parent / "oracles"
GROUPS = {
    "TENSOR_MODEL_PARALLEL_GROUP": ("tp", "dense"),
    "PIPELINE_MODEL_PARALLEL_GROUP": ("pp", "dense"),
    "DATA_PARALLEL_GROUP": ("dp", "dense"),
    "DATA_PARALLEL_GROUP_WITH_CP": ("dp-cp", "dense"),
    "CONTEXT_PARALLEL_GROUP": ("cp", "dense"),
    "MODEL_PARALLEL_GROUP": ("tp-pp", "dense"),
    "TENSOR_AND_DATA_PARALLEL_GROUP": ("tp-dp", "dense"),
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": ("tp-dp-cp", "dense"),
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": ("tp-cp", "dense"),
    "EXPERT_MODEL_PARALLEL_GROUP": ("ep", "expert"),
    "EXPERT_TENSOR_PARALLEL_GROUP": ("tp", "expert"),
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": ("tp-ep", "expert"),
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": ("tp-ep-pp", "expert"),
    "EXPERT_DATA_PARALLEL_GROUP": ("dp", "expert"),
}
COORDINATES = {
    "tensor_model_parallel": ("tp", "dense"),
    "context_parallel": ("cp", "dense"),
    "data_parallel": ("dp", "dense"),
    "expert_model_parallel": ("ep", "expert"),
    "expert_tensor_parallel": ("tp", "expert"),
    "expert_data_parallel": ("dp", "expert"),
}
INSTANCES = "num_distributed_optimizer_instances"  # no size of the grid; tests/distributed/test_context.py divides its groups
NOT_OURS = ("hierarchical_context_parallel_sizes",)


def _facts() -> list[Any]:
    facts = [f for name in ("w8", "w16") for f in json.loads((ORACLES / f"process_groups_{name}.json").read_text())["facts"]]
    kept = [fact for fact in facts if not any(name in fact["args"] for name in NOT_OURS)]
    return [pytest.param(f, id=f"{f['world']}-{'-'.join(f'{k[:6]}{v}' for k, v in f['args'].items())}") for f in kept]


@pytest.mark.parametrize("fact", _facts())
def test_groups_equal_megatron_core(fact: dict[str, Any]) -> None:
    if "error" in fact:
        with pytest.raises(ConfigError, match=r"\d+.*[Ss]et|Put pp last"):
            RankGrid(ParallelLayout(**fact["args"]), fact["world"])
        return
    grid = RankGrid(ParallelLayout(**{name: size for name, size in fact["args"].items() if name != INSTANCES}), fact["world"])

    def theirs(name: str) -> set[tuple[int, ...]]:
        groups = fact["groups"].get(name) or fact["groups"][fact["same_as"][name]]
        return {tuple(sorted(group)) for group in groups}

    compared = 0
    for name, (axes, which) in GROUPS.items():
        if name in fact["groups"] or name in fact["same_as"]:
            assert {tuple(sorted(group)) for group in grid.groups(axes, which)} == theirs(name), name
            compared += 1
    assert compared >= len(GROUPS) - 1
    first_stages = [rank for rank in range(fact["world"]) if grid.coordinate(rank, "pp") == 0]
    assert {grid.embedding_group_of(rank) for rank in first_stages} == theirs("EMBEDDING_GROUP")
    for rank, coordinates in fact["coords"].items():
        for name, (axis, which) in COORDINATES.items():
            if isinstance(coordinates[name], list):
                assert [grid.coordinate(int(rank), axis, which), grid.size(axis, which)] == coordinates[name], name


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor_model_parallel_size": 0}, r"tensor_model_parallel_size is 0.*1 or more"),
        ({"pipeline_model_parallel_size": 1.5}, r"pipeline_model_parallel_size is 1\.5"),
        ({"sequence_parallel": True}, r"sequence_parallel is True with tensor_model_parallel_size=1"),
        ({"virtual_pipeline_model_parallel_size": 2}, r"virtual_pipeline_model_parallel_size=2 needs a pipeline"),
        ({"order": "tp-dp"}, r"order is 'tp-dp'.*each of tp, cp, ep, dp, pp once"),
    ],
)
def test_sizes_that_contradict_themselves(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelLayout(**sizes)


def test_a_world_that_does_not_fit_names_the_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"6 ranks .*replicas of 4 ranks \(tensor 2 x context 1 x pipeline 2\).*multiple of 4"
    ):
        RankGrid(ParallelLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), 6)
