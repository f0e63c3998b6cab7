"""Optimizer state as checkpoints see it: complete, written once, and readable by any other
layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megatron_lightning.config import DataParallelOptions
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.optim import DistributedOptimizer, GradientReducer
from megatron_lightning.optim.stepping.elementwise import reads_tensors
from megatron_lightning.parallel import ParallelContext, ParallelLayout, ShardSpec
from megatron_lightning.parallel.shards.tensor_shards import TensorShards
from tests.helpers.ranks import run_ranks

# Saved state: (name, key) -> (dtype, array); hyper-parameters of each group.
Saved = dict[tuple[str, str], tuple[torch.dtype, np.ndarray]]
Groups = list[dict[str, Any]]
SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (6, 8),
    "bias": (5,),
    "scalar": (),
    "cube": (3, 4, 5),
    "fused": (8, 3),
}


def build(
    context: ParallelContext, sharded: bool, dtype: torch.dtype, cls: type[torch.optim.Optimizer]
) -> tuple[dict[str, nn.Parameter], GradientReducer, DistributedOptimizer]:
    tp = context.tp
    specs = {name: ShardSpec.replicated(shape) for name, shape in SHAPES.items()}
    specs["matrix"] = ShardSpec.split((6, 8), dim=1, size=tp.size, rank=tp.rank)
    specs["fused"] = ShardSpec.split((8, 3), dim=0, size=tp.size, rank=tp.rank, blocks=2)
    parameters = {name: nn.Parameter(specs[name].shard(initial(name)).to(dtype)) for name in SHAPES}
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    reducer = GradientReducer(
        parameters, specs, context, sharded=sharded, options=DataParallelOptions(bucket_size=70)
    )
    groups = [
        {
            "params": [parameters["matrix"], frozen, parameters["cube"], parameters["fused"]],
            "lr": 0.03,
        },
        {"params": [parameters["bias"], parameters["scalar"]]},
    ]
    optimizer = DistributedOptimizer(cls(groups, lr=0.1), reducer, {**parameters, "frozen": frozen})
    return parameters, reducer, optimizer


def initial(name: str) -> torch.Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(len(name)))


def step(
    parameters: dict[str, nn.Parameter],
    reducer: GradientReducer,
    optimizer: DistributedOptimizer,
    number: int,
) -> None:
    reducer.begin_step()
    for seed, name in enumerate(SHAPES):
        generator = torch.Generator().manual_seed(100 * number + seed)
        gradient = torch.randn(SHAPES[name], generator=generator)
        local = reducer.specs[name].shard(gradient).to(parameters[name].dtype)
        (parameters[name] * local).sum().backward()
    reducer.finish(1.0 / reducer.context.dp_cp.size)
    optimizer.optimizer.step()


def name_and_key(state: TensorShards) -> tuple[str, str]:
    """Return the parameter's name and the key of one state."""
    name, _, key = state.name.rpartition(".")
    return name, key


def saved_by_this_rank(optimizer: DistributedOptimizer) -> list[tuple[Any, ...]]:
    return [
        (
            *name_and_key(t),
            t.global_shape,
            t.dtype,
            [(offset, data.float().numpy().copy()) for offset, data in t.shards],
        )
        for t in optimizer.state_tensors()
        if t.writes and t.replicas.rank == 0
    ]


def fill(optimizer: DistributedOptimizer, saved: Saved, groups: Groups) -> None:
    for tensor in optimizer.allocate_state(
        {key: (array.shape, dtype) for key, (dtype, array) in saved.items()}
    ):
        array = saved[name_and_key(tensor)][1]
        assert tensor.global_shape == array.shape
        for shard in tensor.shards:
            shard.data.copy_(torch.from_numpy(np.asarray(array[shard.box.slices])))
    optimizer.load_param_groups(groups)
    optimizer.finish_restore()


def run(
    tp: int,
    sharded: bool,
    dtype: torch.dtype,
    cls: type[torch.optim.Optimizer],
    first: int,
    last: int,
    restore: tuple[Saved, Groups, dict[str, np.ndarray]] | None,
) -> tuple[list[tuple[Any, ...]], Groups, dict[str, tuple[Any, ...]]]:
    """Train steps [first, last); return what this rank saves of the optimizer and the shards of its
    parameters."""
    context = ParallelContext(ParallelLayout(tensor_model_parallel_size=tp))
    parameters, reducer, optimizer = build(context, sharded, dtype, cls)
    if restore is not None:
        saved, groups, weights = restore
        for name, parameter in parameters.items():
            parameter.data.copy_(
                reducer.specs[name].shard(torch.from_numpy(np.asarray(weights[name])))
            )
        fill(optimizer, saved, groups)
    for number in range(first, last):
        step(parameters, reducer, optimizer, number)
        optimizer.optimizer.param_groups[0]["lr"] = 0.03 / (number + 2)
    shards = {
        name: (
            SHAPES[name],
            [
                (o, v.float().numpy().copy())
                for o, v in reducer.specs[name].shards(parameter.detach())
            ],
        )
        for name, parameter in parameters.items()
    }
    return saved_by_this_rank(optimizer), optimizer.param_groups(), shards


def assemble(results: list[Any]) -> tuple[Saved, Groups, dict[str, np.ndarray]]:
    """Join the written shards; every element must be written exactly once."""
    saved: Saved = {}
    times: dict[tuple[str, str], np.ndarray] = {}
    weights = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    for written, _, shards in results:
        for name, key, shape, dtype, boxes in written:
            saved.setdefault((name, key), (dtype, np.zeros(shape, np.float32)))
            for offset, array in boxes:
                at = tuple(slice(o, o + n) for o, n in zip(offset, array.shape, strict=True))
                saved[name, key][1][at] = array
                times.setdefault((name, key), np.zeros(shape))[at] += 1
        for name, (_, boxes) in shards.items():
            for offset, array in boxes:
                weights[name][
                    tuple(slice(o, o + n) for o, n in zip(offset, array.shape, strict=True))
                ] = array
    assert all((count == 1).all() for count in times.values())
    return saved, results[0][1], weights


ADAMW = torch.optim.AdamW
LAYOUTS = [
    (1, 1, True),
    (2, 1, True),
    (4, 1, True),
    (4, 2, True),
    (2, 2, False),
    (4, 2, False),
    (4, 4, True),
]


# The arithmetic per element is the same everywhere; what differs is vector lanes and that 1/3 + 1/3
# + … is rounded.
@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("ranks", "tp", "sharded"), [layout for layout in LAYOUTS if layout[1] < 4]
)
@pytest.mark.parametrize("cls", [ADAMW, torch.optim.Adagrad], ids=["adamw", "adagrad"])
def test_state_equals_one_process_and_resumes_elsewhere(
    ranks: int, tp: int, sharded: bool, cls: type[torch.optim.Optimizer]
) -> None:
    fp32 = torch.float32
    one = assemble(run_ranks(1, run, 1, False, fp32, cls, 0, 3, None))
    there = assemble(run_ranks(ranks, run, tp, sharded, fp32, cls, 0, 3, None))
    assert one[0].keys() == there[0].keys() and one[1] == there[1]
    assert (
        one[1][0]["params"] == ["matrix", "frozen", "cube", "fused"] and one[1][0]["lr"] == 0.03 / 4
    )
    for key, (dtype, array) in one[0].items():
        assert there[0][key][0] == dtype
        np.testing.assert_allclose(there[0][key][1], array, rtol=1e-6, atol=1e-7, err_msg=str(key))
    uninterrupted = assemble(run_ranks(1, run, 1, False, fp32, cls, 0, 5, None))
    resumed = assemble(run_ranks(2, run, 1, True, fp32, cls, 3, 5, there))
    for name, weight in uninterrupted[2].items():
        np.testing.assert_allclose(resumed[2][name], weight, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("ranks", "tp", "sharded"), [(2, 1, True), (4, 2, False)])
def test_masters_are_saved_and_restored_exactly(ranks: int, tp: int, sharded: bool) -> None:
    bf16 = torch.bfloat16
    saved = assemble(run_ranks(ranks, run, tp, sharded, bf16, ADAMW, 0, 3, None))
    masters = {name: array for (name, key), (_, array) in saved[0].items() if key == "master"}
    assert masters.keys() == SHAPES.keys()
    for name, master in masters.items():
        assert np.array_equal(
            torch.from_numpy(np.asarray(master)).bfloat16().float().numpy(), saved[2][name]
        )
    uninterrupted = assemble(run_ranks(1, run, 1, False, bf16, ADAMW, 0, 5, None))
    resumed = assemble(run_ranks(2, run, 1, True, bf16, ADAMW, 3, 5, saved))
    for key, (_, array) in uninterrupted[0].items():
        np.testing.assert_allclose(
            resumed[0][key][1], array, rtol=1e-5, atol=1e-6, err_msg=str(key)
        )
    # Into fp32 the masters are read themselves, not their rounded copies; without masters they
    # begin at the parameters.
    exact = assemble(run_ranks(2, run, 1, True, torch.float32, ADAMW, 3, 3, saved))
    assert all(np.array_equal(exact[2][name], master) for name, master in masters.items())
    without = {key: value for key, value in saved[0].items() if key[1] != "master"}
    rounded = assemble(run_ranks(2, run, 1, True, bf16, ADAMW, 3, 3, (without, saved[1], saved[2])))
    assert all(np.array_equal(rounded[0][name, "master"][1], saved[2][name]) for name in SHAPES)


def existing_state() -> None:
    """An optimizer that has stepped before it is sharded keeps its state."""
    context, parameter = ParallelContext(ParallelLayout()), nn.Parameter(torch.zeros(300))
    optimizer = torch.optim.SGD([("w", parameter)], lr=1.0, momentum=0.5)
    parameter.grad = torch.arange(300.0)
    optimizer.step()
    reducer = GradientReducer(
        {"w": parameter}, {"w": ShardSpec.replicated((300,))}, context, sharded=True
    )
    DistributedOptimizer(optimizer, reducer)
    reducer.begin_step()
    parameter.sum().backward()
    reducer.finish(0.5)
    optimizer.step()
    assert torch.equal(parameter.detach(), -(1.5 * torch.arange(300.0) + 1.0))
    assert optimizer.param_groups[0]["param_names"] == ["w"]


def test_existing_state_is_cut() -> None:
    run_ranks(2, existing_state)


def loose_parameter() -> None:
    context, parameter = ParallelContext(ParallelLayout()), nn.Parameter(torch.zeros(3))
    reducer = GradientReducer(
        {"w": parameter}, {"w": ShardSpec.replicated((3,))}, context, sharded=True
    )
    loose = torch.optim.SGD([parameter, nn.Parameter(torch.zeros(2))], lr=1.0)
    with pytest.raises(
        ConfigError,
        match=r"param_groups\.0\.1 of SGD, of shape \(2,\), is not a trainable parameter",
    ):
        DistributedOptimizer(loose, reducer)
    matrix = torch.optim.Adafactor([nn.Parameter(torch.zeros(4, 6))])
    assert reads_tensors(matrix)


def test_what_cannot_be_sharded_is_refused() -> None:
    run_ranks(2, loose_parameter)


def test_matrix_optimizers_step_whole_masters_without_sharding() -> None:
    context = ParallelContext(ParallelLayout())
    start = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    parameter, reference = nn.Parameter(start.clone()), nn.Parameter(start.float())
    reducer = GradientReducer(
        {"w": parameter}, {"w": ShardSpec.replicated((4, 6))}, context, sharded=True
    )
    optimizer = DistributedOptimizer(torch.optim.Adafactor([parameter], lr=0.1), reducer)
    ordinary = torch.optim.Adafactor([reference], lr=0.1)
    for _ in range(2):
        reducer.begin_step()
        (parameter * start).sum().backward()
        reducer.finish()
        optimizer.optimizer.step()
        reference.grad = start.float()
        ordinary.step()
    assert torch.equal(parameter, reference.bfloat16())
    assert {name_and_key(t)[1]: t.global_shape for t in optimizer.state_tensors()}["row_var"] == (
        4,
        1,
    )


def test_state_with_an_unknown_place_is_refused() -> None:
    context = ParallelContext(ParallelLayout())
    spec = ShardSpec((8, 6), ShardSpec.replicated((4, 6)).boxes, ("tp",))
    parameter = nn.Parameter(torch.ones(4, 6))
    reducer = GradientReducer({"w": parameter}, {"w": spec}, context, sharded=False)
    optimizer = DistributedOptimizer(torch.optim.Adafactor([parameter]), reducer)
    parameter.sum().backward()
    optimizer.optimizer.step()
    with pytest.raises(
        CheckpointError, match=r"state 'row_var' of w in Adafactor has shape \(4, 1\)"
    ):
        optimizer.state_tensors()
    with pytest.raises(CheckpointError, match="2 parameter groups and Adafactor has 1"):
        optimizer.load_param_groups([{}, {}])
