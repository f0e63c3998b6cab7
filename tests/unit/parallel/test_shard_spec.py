"""Axes of a parameter, as its spec records them at every size: where it is replicated, and which
rank writes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.linear.parallel_linear import ColumnParallelLinear
from megatron_lightning.layers.styles import (
    ColumnParallel,
    GatherLogits,
    HeadParallel,
    ParallelInput,
    RowParallel,
    VocabParallel,
)
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel import (
    AxisGroup,
    ParallelContext,
    ParallelLayout,
    RankGrid,
    ShardingPlan,
    ShardSpec,
    parallelize,
)
from megatron_lightning.parallel.shards.sharding import named_shard_specs
from megatron_lightning.parallel.shards.spec import Box, is_writer
from tests.helpers.layouts import tiny_config

DENSE = {"is_expert": False, "data_axes": "dp-cp", "model_axes": "tp-pp"}
EXPERT = {"is_expert": True, "data_axes": "edp", "model_axes": "etp-ep-pp"}


@pytest.mark.parametrize(
    ("spec", "kind", "replica_axes"),
    [
        (ShardSpec.replicated((4,)), DENSE, ("tp",)),
        (ShardSpec.replicated((4,), partial_over=("tp",)), DENSE, ("tp",)),
        (ShardSpec.split((4,), dim=0, size=1, rank=0), DENSE, ()),
        (ShardSpec.split((4,), dim=0, size=2, rank=0, axis="ep"), EXPERT, ("etp",)),
        (ShardSpec.split((4,), dim=0, size=1, rank=0, axis="etp"), EXPERT, ("ep",)),
        (ShardSpec.replicated((4,), partial_over=("etp",)), EXPERT, ("etp", "ep")),
    ],
)
def test_the_axes_that_a_spec_names_say_the_others(
    spec: ShardSpec, kind: dict[str, Any], replica_axes: tuple[str, ...]
) -> None:
    assert {name: getattr(spec, name) for name in kind} == kind
    assert spec.replica_axes == replica_axes


def _rank(grid: RankGrid, rank: int) -> Any:
    """Return as much of a context as arithmetic gives."""
    return SimpleNamespace(
        axis=lambda name: AxisGroup(
            name, grid.group_of(rank, name), grid.coordinate(rank, name), None
        )
    )


def _experts(grid: RankGrid, rank: int) -> ShardSpec:
    """Return the spec of 4 experts' matrices [4, 6, 5]: experts over ``ep``, the rows of each over
    ``etp``."""
    experts, rows = 4 // grid.size("ep"), 6 // grid.size("etp")
    offset = (grid.coordinate(rank, "ep") * experts, grid.coordinate(rank, "etp") * rows, 0)
    return ShardSpec((4, 6, 5), (Box(offset, (experts, rows, 5)),), sharded_over=("ep", "etp"))


def test_one_dim_over_one_axis_and_another_over_a_second() -> None:
    layout = ParallelLayout(
        tensor_model_parallel_size=4,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=2,
        context_parallel_size=2,
    )
    grid = RankGrid(layout, 8)
    full, seen = torch.arange(120.0).view(4, 6, 5), torch.zeros(4, 6, 5)
    for rank in range(8):
        spec, context = _experts(grid, rank), _rank(grid, rank)
        assert spec.local_shape == (2, 3, 5) and spec.data_axes == "edp" and spec.replica_axes == ()
        # Every box has its own group of replicas, which divides the work.
        assert is_writer(spec, context)
        local = spec.shard(full)
        [shard] = spec.shards(local)
        assert torch.equal(full[shard.box.slices], local)
        for part in spec.flat_shards(local.flatten()[7:29], 7):  # as a sharded optimizer holds it
            assert torch.equal(full[part.box.slices], part.data)
        if grid.coordinate(rank, "edp") == 0:
            seen[shard.box.slices] += 1
        router = ShardSpec.replicated((4, 5))
        assert is_writer(router, context) == (grid.coordinate(rank, "tp") == 0)
        bias = ShardSpec((4, 5), (Box(shard.offset[::2], (2, 5)),), ("ep",), partial_over=("etp",))
        assert is_writer(bias, context) == (grid.coordinate(rank, "etp") == 0)
    assert torch.equal(seen, torch.ones(4, 6, 5))


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_experts_over_one_axis_and_gate_and_up_of_each_over_another(ep: int, etp: int) -> None:
    full = torch.arange(4.0 * 12 * 5).view(4, 12, 5)  # [E, 2f, h]
    seen = torch.zeros_like(full)
    for i in range(ep):
        for j in range(etp):
            experts = ShardSpec.split((4, 12, 5), dim=0, size=ep, rank=i, axis="ep")
            rows = ShardSpec.split((4, 12, 5), dim=1, size=etp, rank=j, axis="etp", blocks=2)
            spec = experts.crossed(rows)
            assert spec.boxes == rows.crossed(experts).boxes
            own = full[i * 4 // ep : (i + 1) * 4 // ep]
            gate, up = own.split(6, dim=1)
            mine = [half.chunk(etp, dim=1)[j] for half in (gate, up)]
            local = spec.shard(full)
            assert torch.equal(local, torch.cat(mine, dim=1)) and spec.is_expert
            for box, data in ((shard.box, shard.data) for shard in spec.shards(local)):
                assert torch.equal(full[box.slices], data)
                seen[box.slices] += 1
            start, stop = local.numel() // 3, local.numel() - 1
            parts = spec.flat_shards(local.flatten()[start:stop], start)
            assert sum(part.data.numel() for part in parts) == stop - start
            assert all(torch.equal(full[part.box.slices], part.data) for part in parts)
    assert torch.equal(seen, torch.ones_like(full))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"dim": 0, "axis": "ep"}, {"dim": 0, "axis": "etp"}, "both split dim 0"),
        ({"dim": 0, "axis": "ep"}, {"dim": 1, "axis": "ep"}, "both split over ep"),
        (
            {"dim": 0, "axis": "ep", "blocks": 2},
            {"dim": 1, "axis": "etp", "blocks": 2},
            "stack 2 and 2 boxes along two dims",
        ),
    ],
    ids=["dim", "axis", "boxes"],
)
def test_splits_that_cannot_be_combined(
    first: dict[str, Any], second: dict[str, Any], message: str
) -> None:
    one, other = (ShardSpec.split((4, 4), size=2, rank=0, **split) for split in (first, second))
    with pytest.raises(ShardingError, match=rf"shape \(4, 4\) .*{message}. Split one dim over one"):
        one.crossed(other)
    with pytest.raises(ShardingError, match=r"shapes are \(4, 4\) and \(5,\)"):
        one.crossed(ShardSpec.replicated((5,)))


def test_of_a_tied_pair_and_of_what_all_stages_hold_one_rank_writes() -> None:
    grid = RankGrid(ParallelLayout(pipeline_model_parallel_size=2), 2)
    outside = ShardSpec.replicated((4,), partial_over=("pp",))
    assert [is_writer(outside, _rank(grid, rank)) for rank in range(2)] == [True, False]
    copy = ShardSpec(outside.global_shape, outside.boxes, tied_to="owner")
    assert not is_writer(copy, _rank(grid, 0))


def test_over_one_rank_modules_stay_and_specs_record_the_axis() -> None:
    class OwnLinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 4))

    model = nn.ModuleDict(
        {
            "column": nn.Linear(4, 6),
            "row": nn.Linear(6, 4),
            "own": OwnLinear(),
            "norm": nn.LayerNorm(4),
        }
    )
    model["words"] = nn.Embedding(5, 4)
    model["norm_of_heads"], model["logits"] = nn.LayerNorm(2), nn.Identity()
    table = ShardingPlan(
        modules={
            # 6 rows are no 4 blocks, which one rank need not cut.
            "column": ColumnParallel(num_blocks=4),
            "row": RowParallel(),
            "own": ColumnParallel(),
            "words": VocabParallel(),
            "norm_of_heads": HeadParallel(),
            "norm": ParallelInput(),
            "logits": GatherLogits(7),
        }
    )
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    parallelize(model, ParallelContext(ParallelLayout()), table)
    assert dict(model.named_modules()) == modules and not model["norm"]._forward_pre_hooks
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    specs = named_shard_specs(model)
    assert {name for name, spec in specs.items() if spec.sharded_over == ("tp",)} == {
        "column.weight", "column.bias", "row.weight", "own.weight", "words.weight"
    }  # fmt: skip
    assert {name for name, spec in specs.items() if spec.partial_over} == {
        "norm_of_heads.weight",
        "norm_of_heads.bias",
    }
    assert all(
        len(spec.boxes) == 1 and spec.local_shape == spec.global_shape for spec in specs.values()
    )


def test_a_plan_records_the_same_axes_over_one_rank_and_over_two() -> None:
    config = tiny_config(
        num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=20, max_sequence_length=8
    )
    model = GPTModel(config)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    parallelize(model, ParallelContext(ParallelLayout()), model.sharding_plan())
    assert not any(isinstance(module, ColumnParallelLinear) for module in model.modules())
    assert all(
        torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters()
    )
    one = {name: spec.sharded_over for name, spec in named_shard_specs(model).items()}
    context = ParallelContext(ParallelLayout())
    context.tp = context._groups["tp"] = AxisGroup("tp", (0, 1), 0, None)
    model = parallelize(GPTModel(config), context, model.sharding_plan())  # type: ignore[assignment]
    assert {name: spec.sharded_over for name, spec in named_shard_specs(model).items()} == one
    assert set(one.values()) == {(), ("tp",)}
