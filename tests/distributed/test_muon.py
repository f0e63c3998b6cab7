"""Muon on whole, logical matrices: the same training on every layout, and as torch's Muon on
matrices that are stored apart.

Muon orthogonalises in bf16, so that two gradients that differ in their last fp32 digit may give
updates that differ by a bf16 digit: 2^-8 of lr x (singular values about 1) an element and step. A
fused or a sharded matrix stepped as it is stored differs by the size of the update itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.config import DataParallelOptions, MambaConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.models import GPTModel
from megatron_lightning.optim import (
    ChainedOptimizer,
    DistributedOptimizer,
    GradientReducer,
    Muon,
)
from megatron_lightning.parallel import ParallelContext, ParallelLayout, ShardSpec, parallelize
from megatron_lightning.parallel.shards.sharding import named_shard_specs
from megatron_lightning.parallel.shards.tensor_shards import TensorShards
from tests.helpers.layouts import tiny_config
from tests.helpers.ranks import run_ranks

MUON: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}
ADAMW: dict[str, Any] = {"lr": 1e-2}
STEPS = 3
TOLERANCE = STEPS * MUON["lr"] * 2**-7

EXPERTS = 4
Sizes = tuple[int, int, int]  # tp, ep, etp

MAMBA = tiny_config(
    layer_pattern="M",
    hidden_size=6,
    num_attention_heads=2,
    vocab_size=8,
    mamba=MambaConfig(num_heads=2, head_dim=4, num_groups=2, state_dim=4),
)
IN_PARTS = (8, 8, 8, 8, 2)  # z, x, B, C and dt

# name -> (shape, cut dim, blocks, fused rows); "qkv": 2 groups of 4 + 2 + 2 rows, "fc1": gate and
# up, "in_proj": of Mamba-2. Experts are stacked.
SHAPES: dict[str, tuple[tuple[int, ...], int | None, int, tuple[int, ...]]] = {
    "qkv": ((16, 6), 0, 1, (4, 2, 2)),
    "fc1": ((20, 6), 0, 2, (10, 10)),
    "fc2": ((6, 10), 1, 1, ()),
    "in_proj": ((sum(IN_PARTS), 6), 0, 1, IN_PARTS),
    "router": ((4, 6), None, 1, ()),
    "experts.fc1": ((EXPERTS, 20, 6), 1, 2, (10, 10)),
    "experts.fc2": ((EXPERTS, 6, 10), 2, 1, ()),
    "norm": ((6,), None, 1, ()),
}


def parts_of(name: str, whole: Tensor) -> list[Tensor]:
    """The matrices that a full weight represents, by index rather than by view."""
    if name == "qkv":
        rows = [
            [r + 8 * g for g in range(2) for r in part]
            for part in (range(4), range(4, 6), range(6, 8))
        ]
        return [whole[part] for part in rows]
    if name == "in_proj":
        return list(whole.split(IN_PARTS))
    if name.startswith("experts"):
        name = name.removeprefix("experts.")
        return [part for index in range(EXPERTS) for part in parts_of(name, whole[index])]
    return list(whole.chunk(2)) if name == "fc1" else [whole]


def initial(name: str) -> Tensor:
    return torch.randn(
        SHAPES[name][0], generator=torch.Generator().manual_seed(len(name) + ord(name[0]))
    )


def gradient(name: str, step: int) -> Tensor:
    return torch.randn(
        SHAPES[name][0],
        generator=torch.Generator().manual_seed(100 * step + ord(name[0]) + len(name)),
    )


def reference() -> dict[str, tuple[list[np.ndarray], list[np.ndarray]]]:
    """torch's own Muon and AdamW on matrices that are stored apart: name -> (values, momenta)."""
    apart = {
        name: [nn.Parameter(part.clone()) for part in parts_of(name, initial(name))]
        for name in SHAPES
    }
    muon = torch.optim.Muon([p for name in SHAPES if name != "norm" for p in apart[name]], **MUON)
    adamw = torch.optim.AdamW(apart["norm"], **ADAMW)
    for step in range(STEPS):
        for name, parameters in apart.items():
            for parameter, part in zip(
                parameters, parts_of(name, gradient(name, step)), strict=True
            ):
                parameter.grad = part.clone()
        muon.step()
        adamw.step()
    momenta = {
        name: [muon.state[p]["momentum_buffer"] for p in apart[name]]
        for name in SHAPES
        if name != "norm"
    }
    return {
        name: ([p.detach().numpy() for p in parameters], [m.numpy() for m in momenta.get(name, [])])
        for name, parameters in apart.items()
    }


def spec_of(name: str, context: ParallelContext) -> ShardSpec:
    shape, dim, blocks, fused = SHAPES[name]
    if dim is None:
        return ShardSpec.replicated(shape)
    if name == "in_proj":  # as the layer's plan shards it
        model = GPTModel(MAMBA)
        parallelize(model, context, model.sharding_plan())
        return named_shard_specs(model)["decoder.layers.0.mixer.in_proj.weight"]
    group = context.etp if name.startswith("experts") else context.tp
    on: dict[str, Any] = {"size": group.size, "rank": group.rank, "axis": group.name}
    spec = ShardSpec.split(shape, dim=dim, blocks=blocks, **on)
    if name.startswith("experts"):
        on = {"size": context.ep.size, "rank": context.ep.rank, "axis": "ep"}
        spec = ShardSpec.split(shape, dim=0, **on).crossed(spec)
    return replace(spec, fused_rows=fused)


def build(
    sizes: Sizes, dtype: torch.dtype, sharded: bool, options: DataParallelOptions
) -> tuple[Any, ...]:
    tp, ep, etp = sizes
    layout = ParallelLayout(
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    context = ParallelContext(layout)
    specs = {name: spec_of(name, context) for name in SHAPES}
    parameters = {
        name: nn.Parameter(spec.shard(initial(name)).to(dtype)) for name, spec in specs.items()
    }
    matrices = [parameter for name, parameter in parameters.items() if name != "norm"]
    optimizer = ChainedOptimizer(
        Muon(matrices, **MUON), torch.optim.AdamW([parameters["norm"]], **ADAMW)
    )
    reducer = GradientReducer(parameters, specs, context, sharded=sharded, options=options)
    return context, parameters, reducer, DistributedOptimizer(optimizer, reducer)


def step(
    parameters: dict[str, nn.Parameter],
    reducer: GradientReducer,
    view: DistributedOptimizer,
    number: int,
) -> None:
    reducer.begin_step()
    reducer.sync = True
    context = reducer.context
    copies = {name: context.axis(reducer.specs[name].data_axes).size for name in parameters}
    # Of a mean over data-parallel ranks; what an expert sees comes from all of them.
    shards = {
        name: reducer.specs[name].shard(gradient(name, number)) * context.dp_cp.size / copies[name]
        for name in parameters
    }
    sum(
        (parameter.float() * shards[name]).sum() for name, parameter in parameters.items()
    ).backward()
    reducer.finish(1.0 / context.dp_cp.size)
    view.optimizer.step(lambda: None)  # with a closure, as Lightning does


def name_and_key(state: TensorShards) -> tuple[str, str]:
    """Return the parameter's name and the key of one state."""
    name, _, key = state.name.rpartition(".")
    return name, key


def train(
    sizes: Sizes, dtype: torch.dtype, sharded: bool, options: DataParallelOptions
) -> dict[str, Any]:
    """Train, save after the first step, and train the rest again from there with everything created
    again."""
    _, parameters, reducer, view = build(sizes, dtype, sharded, options)
    owned = sum(p.numel() for group in view.optimizer.param_groups for p in group["params"])
    for number in range(STEPS):
        step(parameters, reducer, view, number)
        if number == 0:
            saved = [(t, [data.clone() for _, data in t.shards]) for t in view.state_tensors()]
            weights = {name: p.detach().clone() for name, p in parameters.items()}
    _, again, reducer, resumed = build(sizes, dtype, sharded, options)
    for name, parameter in again.items():
        parameter.data.copy_(weights[name])
    allocated = resumed.allocate_state(
        {name_and_key(t): (t.global_shape, t.dtype) for t, _ in saved}
    )
    for tensor, (_, values) in zip(allocated, saved, strict=True):
        for (_, target), source in zip(tensor.shards, values, strict=tensor.global_shape != ()):
            target.copy_(source)
    resumed.finish_restore()
    for number in range(1, STEPS):
        step(again, reducer, resumed, number)
    assert all(torch.equal(parameters[name], again[name]) for name in parameters)  # to the bit
    written = [
        (*name_and_key(t), t.dtype, [(at, data.float().numpy().copy()) for at, data in t.shards])
        for t in view.state_tensors()
        if t.writes and t.replicas.rank == 0
    ]
    values = {
        name: [
            (at, data.float().numpy().copy()) for at, data in reducer.specs[name].shards(p.detach())
        ]
        for name, p in parameters.items()
    }
    return {"values": values, "state": written, "owned": owned}


def assemble(shape: tuple[int, ...], boxes: list[Any]) -> Tensor:
    whole, times = np.zeros(shape, np.float32), np.zeros(shape)
    for offset, array in boxes:
        at = tuple(slice(o, o + n) for o, n in zip(offset, array.shape, strict=True))
        whole[at], times[at] = array, times[at] + 1
    assert (times == 1).all()
    return torch.from_numpy(whole)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("ranks", "sizes", "sharded", "dtype", "options"),
    [
        (1, (1, 1, 1), False, torch.float32, {}),
        (2, (1, 1, 1), True, torch.float32, {}),
        (4, (2, 2, 1), True, torch.float32, {"optimizer_cpu_offload": True}),
        (4, (2, 1, 2), True, torch.bfloat16, {}),
        pytest.param(2, (2, 1, 2), False, torch.float32, {}, marks=pytest.mark.slow),
        pytest.param(4, (2, 2, 2), False, torch.float32, {}, marks=pytest.mark.slow),
        pytest.param(4, (1, 2, 2), True, torch.float32, {}, marks=pytest.mark.slow),
        pytest.param(4, (2, 1, 1), True, torch.float32, {}, marks=pytest.mark.slow),
        pytest.param(
            8,
            (2, 2, 2),
            True,
            torch.float32,
            {"num_distributed_optimizer_instances": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_layout_steps_logical_matrices(
    ranks: int, sizes: Sizes, sharded: bool, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    results = run_ranks(ranks, train, sizes, dtype, sharded, DataParallelOptions(**options))
    tp, ep, etp = sizes
    expected = reference()
    # bf16 weights are rounded masters, and the gradients were rounded to bf16 as well: 2^-8 of
    # weights up to 3
    tolerance = TOLERANCE if dtype == torch.float32 else TOLERANCE + 3 * 2**-7
    for name, (shape, dim, _, _) in SHAPES.items():
        parts = ep * etp if name.startswith("experts") else tp
        holders = results[: parts if dim is not None else 1]  # of replicas the first
        whole = assemble(shape, [box for result in holders for box in result["values"][name]])
        for part, value in zip(parts_of(name, whole), expected[name][0], strict=True):
            np.testing.assert_allclose(part.numpy(), value, rtol=0, atol=tolerance, err_msg=name)
        if name == "norm":
            continue
        boxes = [
            box
            for result in results
            for n, key, _, boxes in result["state"]
            if (n, key) == (name, "momentum_buffer")
            for box in boxes
        ]
        momentum = assemble(shape, boxes)  # written exactly once
        rounding = 1e-6 if dtype == torch.float32 else 2**-6
        for part, value in zip(parts_of(name, momentum), expected[name][1], strict=True):
            np.testing.assert_allclose(part.numpy(), value, rtol=0, atol=rounding, err_msg=name)
    masters = [key for result in results for _, key, _, _ in result["state"] if key == "master"]
    assert bool(masters) == (dtype == torch.bfloat16)
    # Every shared element has one owner.
    if sharded and "num_distributed_optimizer_instances" not in options:
        total = sum(result["owned"] for result in results)
        numels = {name: int(np.prod(shape)) for name, (shape, *_) in SHAPES.items()}
        assert total == sum(n * (tp if name == "norm" else 1) for name, n in numels.items())


def test_stacked_weights_without_a_strategy() -> None:
    """Each expert's update is torch's of its matrix, to the bit; the momentum is stacked."""
    stack = nn.Parameter(torch.randn(3, 4, 5))
    apart = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    plain = nn.Parameter(torch.randn(4, 2))
    ours, torchs = Muon([stack, plain], **MUON), torch.optim.Muon(apart, **MUON)
    for _ in range(2):
        stack.grad = torch.randn(3, 4, 5)
        for matrix, part in zip(apart, stack.grad, strict=True):
            matrix.grad = part.clone()
        ours.step()
        torchs.step()
    assert torch.equal(stack, torch.stack(apart))
    momenta = [torchs.state[matrix]["momentum_buffer"] for matrix in apart]
    assert torch.equal(ours.state[stack]["momentum_buffer"], torch.stack(momenta))
    with pytest.raises(ConfigError, match=r"shape \(5,\), which is neither a matrix nor a stack"):
        Muon([{"params": [stack]}, {"params": [nn.Parameter(torch.ones(5))]}])
    with pytest.raises(ConfigError, match=r"shape \(8, 1, 4\), which is neither a matrix"):
        Muon([nn.Parameter(torch.zeros(8, 1, 4))])  # a depthwise convolution
    with pytest.raises(ValueError, match="empty parameter list"):
        Muon([])


def test_a_chain_shares_groups_and_state() -> None:
    matrix, bias = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))
    chain = ChainedOptimizer(torch.optim.Muon([matrix], **MUON), torch.optim.AdamW([bias], **ADAMW))
    scheduler = torch.optim.lr_scheduler.StepLR(chain, 1, gamma=0.5)
    for _ in range(2):
        matrix.grad, bias.grad = torch.ones(3, 4), torch.ones(3)
        chain.step()
        scheduler.step()
    assert [group["lr"] for member in chain.optimizers for group in member.param_groups] == [
        0.025,
        0.0025,
    ]
    again = [nn.Parameter(matrix.detach().clone()), nn.Parameter(bias.detach().clone())]
    other = ChainedOptimizer(
        torch.optim.Muon(again[:1], **MUON), torch.optim.AdamW(again[1:], **ADAMW)
    )
    other.load_state_dict(chain.state_dict())
    for parameter, copied in zip((matrix, bias), again, strict=True):
        parameter.grad, copied.grad = torch.ones_like(parameter), torch.ones_like(copied)
    chain.step()
    other.step()
    assert torch.equal(matrix, again[0]) and torch.equal(bias, again[1])
    with pytest.raises(ConfigError, match=r"unknown which of them is to step it"):
        chain.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ConfigError, match=r"0 optimizers"):
        ChainedOptimizer()
