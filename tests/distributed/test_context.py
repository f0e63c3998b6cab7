from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.parallel.grid.context import GROUPS
from tests.helpers.ranks import run_ranks


def _groups() -> dict[str, int]:
    layout = ParallelLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    first, second = (
        ParallelContext(layout),
        ParallelContext(ParallelLayout(pipeline_model_parallel_size=4)),
    )
    sums = {}
    for name in ("tp", "dp", "pp", "dp-cp", "tp-pp", "world", "embedding"):
        value = torch.tensor(float(first.rank))
        if first.axis(name).process_group is not None:
            dist.all_reduce(value, group=first.axis(name).process_group)
        sums[name] = int(value)
        assert sums[name] == sum(first.axis(name).ranks)
    assert second.pp.ranks == (0, 1, 2, 3) and second.tp.process_group is None
    mesh = first.device_mesh()
    assert mesh["pp"].get_local_rank() == first.pp.rank
    assert (
        mesh.get_group("pp") is first.pp.process_group
        and mesh.get_group("tp") is first.tp.process_group
    )
    assert mesh.get_group("cp").size() == 1
    return sums


def test_groups_communicate_and_two_contexts_coexist() -> None:
    results = run_ranks(4, _groups)
    assert results[3]["tp"] == 2 + 3 and results[3]["pp"] == 1 + 3 and results[0]["world"] == 6


def _shared_communicators(axis: str, layout: ParallelLayout) -> set[str]:
    """Return the groups of data-parallel ranks that share a communicator with a group of layers."""
    context = ParallelContext(layout)
    assert context.axis(axis).size == 2
    layers = {context.axis(n).process_group for n in GROUPS if "dp" not in n} - {None}
    reducing = [context.axis(name) for name in GROUPS if "dp" in name]
    return {group.name for group in reducing if group.process_group in layers}


@pytest.mark.parametrize(
    ("axis", "layout"),
    [
        ("cp", ParallelLayout(context_parallel_size=2)),
        ("ep", ParallelLayout(expert_model_parallel_size=2)),
        ("tp", ParallelLayout(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)),
    ],
)
def test_gradients_share_no_communicator_with_layers(axis: str, layout: ParallelLayout) -> None:
    """Ranks that use other parameters reduce them between other exchanges of layers."""
    assert run_ranks(2, _shared_communicators, axis, layout) == [set()] * 2


def _part_of_the_replicas(tensor: int, instances: int) -> tuple[int, ...]:
    context = ParallelContext(ParallelLayout(tensor_model_parallel_size=tensor))
    return context.divide(context.dp_cp, instances)[0].ranks


@pytest.mark.slow  # eight processes
def test_instances_of_the_optimizer_are_megatron_cores() -> None:
    facts = json.loads(
        (Path(__file__).parents[1] / "oracles" / "process_groups_w8.json").read_text()
    )["facts"]
    [fact] = [fact for fact in facts if "num_distributed_optimizer_instances" in fact["args"]]
    found = run_ranks(8, _part_of_the_replicas, *fact["args"].values())
    assert set(found) == {
        tuple(group) for group in fact["groups"]["INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP"]
    }
