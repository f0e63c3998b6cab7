"""Optimizers that read full tensors: the same training and the same state on every layout.

The sums over data-parallel ranks are exact in these tests (equal gradients, 2 and 4 ranks), so that
owners step the very numbers of one process. Only the order of a reduction over a full tensor could
differ, and owners have it as one process has it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.config import DataParallelOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.optim import ChainedOptimizer, DistributedOptimizer, GradientReducer
from megatron_lightning.optim.optimizer_checks import check_owner_options
from megatron_lightning.optim.owners import assignment
from megatron_lightning.optim.owners.assignment import assign_owners
from megatron_lightning.optim.owners.traffic import Traffic, describe_owners, describe_stack
from megatron_lightning.optim.owners.units import Units
from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.parallel.shards.nested_state import filled, flattened
from megatron_lightning.parallel.shards.spec import ShardSpec
from tests.distributed.test_muon import (
    SHAPES,
    Sizes,
    assemble,
    gradient,
    initial,
    name_and_key,
    spec_of,
    step,
)
from tests.helpers.ranks import run_ranks

STEPS = 3


class Factored(torch.optim.Optimizer):
    """Reads full tensors, and keeps state of every form."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "kind": "factored", "rows": torch.zeros(p.shape[:-1])}
                    state |= {"moment": torch.zeros_like(p), "sides": [torch.zeros(3), None]}
                state["step"] += 1
                state["rows"] += p.grad.square().mean(-1)
                state["sides"][0] += p.grad.norm()
                state["moment"].lerp_(p.grad, 1 / state["step"])
                scale = (1 + state["rows"]).sqrt()[..., None] * state["sides"][0].mean()
                p.sub_(state["moment"] / scale * group["lr"] * p.norm())
        return loss


class Apart(torch.optim.Optimizer):
    """Reads full matrices, each matrix of a stack alone."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "rows": torch.zeros(p.shape[:-1])}
                    state |= {"moment": torch.zeros_like(p)}
                state["step"] += 1
                state["rows"] += p.grad.square().mean(-1)
                state["moment"].lerp_(p.grad, 1 / state["step"])
                scale = (1 + state["rows"]).sqrt()[..., None]
                ratio = p.norm(dim=(-2, -1), keepdim=True)
                p.sub_(state["moment"] / scale * group["lr"] * ratio)
        return loss


Case = tuple[type[torch.optim.Optimizer], Units, Sizes, bool]


def build(case: Case, dtype: torch.dtype) -> tuple[Any, ...]:
    kind, units, (tp, ep, etp), sharded = case
    context = ParallelContext(
        ParallelLayout(
            tensor_model_parallel_size=tp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
        )
    )
    specs = {name: spec_of(name, context) for name in SHAPES}
    parameters = {
        name: nn.Parameter(spec.shard(initial(name)).to(dtype)) for name, spec in specs.items()
    }
    optimizer = ChainedOptimizer(
        kind([p for name, p in parameters.items() if name != "norm"]),  # type: ignore[call-arg]
        torch.optim.AdamW([parameters["norm"]], lr=1e-2),
    )
    reducer = GradientReducer(parameters, specs, context, sharded=sharded)
    owned = {id(optimizer.param_groups[0]): units}
    return context, parameters, reducer, DistributedOptimizer(optimizer, reducer, owned=owned)


Saved = tuple[dict[str, Tensor], dict[str, dict[str, Any]]]


def saved(view: DistributedOptimizer) -> Saved:
    """Return all state of all ranks: full tensors by name, and the rest."""
    written = [
        (t.name, t.global_shape, [(shard.offset, shard.data.float().numpy()) for shard in t.shards])
        for t in view.state_tensors()
        if t.writes and t.replicas.rank == 0
    ]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (written, view.plain_state()))
    boxes: dict[str, list[Any]] = {}
    shapes = {name: shape for mine, _ in ranks for name, shape, _ in mine}
    for mine, _ in ranks:
        for name, _, parts in mine:
            boxes.setdefault(name, []).extend(parts)
    full = {name: assemble(shapes[name], parts) for name, parts in boxes.items()}  # written once
    return full, {name: values for _, plain in ranks for name, values in plain.items()}


def load(view: DistributedOptimizer, state: Saved) -> None:
    full, plain = state
    described = {}
    for name, tensor in full.items():
        parameter, _, key = name.rpartition(".")
        described[parameter, key] = (tuple(tensor.shape), tensor.dtype)
    allocated = view.allocate_state(described)
    view.load_plain_state(plain)
    for tensor in allocated:
        for offset, data in tensor.shards:
            box = tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))
            data.copy_(full[".".join(name_and_key(tensor))][box])
    view.finish_restore()


def equal(left: Saved, right: Saved) -> bool:
    tensors = left[0].keys() == right[0].keys() and all(
        torch.equal(left[0][name], right[0][name]) for name in left[0]
    )
    return tensors and left[1] == right[1]


@patch.object(assignment, "MESSAGE", 1)  # several messages
def train(cases: list[Case], dtype: torch.dtype) -> list[Any]:
    """Train every case, and resume each from the state of the optimizer's first after a step."""
    results, firsts = [], dict[type, Saved]()
    for case in cases:
        _, parameters, reducer, view = build(case, dtype)
        step(parameters, reducer, view, 0)
        mine = saved(view)
        first = firsts.setdefault(case[0], mine)
        assert equal(mine, first)
        weights = {name: p.detach().clone() for name, p in parameters.items()}
        for number in range(1, STEPS):
            step(parameters, reducer, view, number)
        _, again, reducer, resumed = build(case, dtype)
        for name, parameter in again.items():
            parameter.data.copy_(weights[name])
        load(resumed, first)
        assert equal(saved(resumed), first)
        for number in range(1, STEPS):
            step(again, reducer, resumed, number)
        assert all(torch.equal(parameters[name], again[name]) for name in parameters)
        traffic = Traffic.total(exchange.traffic() for exchange in view.exchanges)
        values = {
            name: [
                (at, data.float().numpy().copy())
                for at, data in reducer.specs[name].shards(p.detach())
            ]
            for name, p in parameters.items()
        }
        results.append((values, traffic))
    return results


def reference(kind: type[torch.optim.Optimizer]) -> dict[str, Tensor]:
    parameters = {name: nn.Parameter(initial(name)) for name in SHAPES if name != "norm"}
    optimizer = kind(parameters.values())  # type: ignore[call-arg]
    for number in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = gradient(name, number)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


CASES: list[Case] = [
    (Factored, Units.WHOLE, (2, 2, 1), True),
    (Factored, Units.WHOLE, (1, 2, 2), True),
    (Factored, Units.WHOLE, (2, 4, 1), False),
    (Factored, Units.WHOLE, (1, 1, 1), True),
    (Apart, Units.WHOLE, (1, 1, 1), True),
    (Apart, Units.EXPERTS, (1, 2, 2), True),
    (Apart, Units.EXPERTS, (2, 4, 1), False),
]


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def test_every_layout_steps_full_tensors_and_reads_any_state(dtype: torch.dtype) -> None:
    ranks = run_ranks(4, train, CASES, dtype)
    references = {kind: reference(kind) for kind in (Factored, Apart)}
    tolerance = 1e-6 if dtype == torch.float32 else 2**-5
    for number, (kind, units, (tp, ep, etp), sharded) in enumerate(CASES):
        expected = references[kind]
        for name, value in expected.items():
            parts = ep * etp if name.startswith("experts") else tp
            holders = ranks[: parts if SHAPES[name][1] is not None else 1]
            full = assemble(SHAPES[name][0], [b for r in holders for b in r[number][0][name]])
            torch.testing.assert_close(full, value, rtol=tolerance, atol=tolerance)
        traffic = ranks[0][number][1]
        if sharded:  # one owner each
            sizes = [value.numel() for value in expected.values()]
            stacks = [size for name, size in zip(expected, sizes, strict=True) if "experts" in name]
            assert sum(traffic.owned) == sum(sizes)
            if units is Units.EXPERTS:
                assert traffic.largest == max({*sizes} - {*stacks}) and not traffic.stack
            else:
                assert traffic.largest == max(sizes) and traffic.stack == max(stacks)
            mean = sum(sizes) / 4
            assert max(traffic.owned) <= 4 / 3 * max(mean, traffic.largest)


def test_the_longest_is_assigned_first() -> None:
    weights = [3, 3, 2, 2, 2]
    anyone = [[0, 1]] * 5
    owner = assign_owners(weights, anyone, [[0, 0]] * 5)
    loads = [sum(w for w, o in zip(weights, owner, strict=True) if o == rank) for rank in (0, 1)]
    assert sorted(loads) == [5, 7]  # Graham's example: 7/6 of the best
    # Equally loaded ranks: one that holds the tensor.
    assert assign_owners([4, 4], [[0, 1]] * 2, [[0, 4], [4, 0]]) == [1, 0]
    # An expert stays with its holders, and others fill up.
    assert assign_owners([4, 4, 6], [[0], [0], [0, 1]], [[4, 0], [4, 0], [3, 3]]) == [0, 0, 1]


def test_the_fullest_rank_is_bounded_and_holders_own() -> None:
    draw = random.Random(0)
    for _ in range(300):
        num_ranks, num_units = draw.randint(1, 8), draw.randint(1, 40)
        weights = [draw.choice([64, 4096, 4096, 11008, 50000]) for _ in range(num_units)]
        held = [[0] * num_ranks for _ in weights]
        for weight, has in zip(weights, held, strict=True):  # most of them on one rank
            has[min(draw.randrange(2 * num_ranks), num_ranks - 1)] += weight
        owner = assign_owners(weights, [range(num_ranks)] * num_units, held)
        loads = [
            sum(w for w, o in zip(weights, owner, strict=True) if o == rank)
            for rank in range(num_ranks)
        ]
        # Of the largest k x ranks + 1 units some rank has k + 1, in the best assignment as well.
        largest = sorted(weights, reverse=True)[::num_ranks]
        best = max(sum(weights) / num_ranks, *((k + 1) * w for k, w in enumerate(largest)))
        assert max(loads) <= 4 / 3 * best
    # Flat shards of two ranks: each owns what it holds, and nothing is sent.
    held = [[9, 0], [5, 0], [0, 8], [0, 4]]
    assert assign_owners([9, 5, 8, 4], [[0, 1]] * 4, held) == [0, 0, 1, 1]


def test_a_stage_without_owned_parameters_divides_the_ranks() -> None:
    context = ParallelContext(ParallelLayout(pipeline_model_parallel_size=2), planned_world_size=8)
    parameter = nn.Parameter(torch.ones(4, 4))
    reducer = GradientReducer(
        {"weight": parameter},
        {"weight": ShardSpec.replicated(parameter.shape)},
        context,
        sharded=True,
        options=DataParallelOptions(num_distributed_optimizer_instances=2),
    )
    calls: list[str] = []
    context.divide = lambda group, parts: calls.append(group.name) or (group, group)  # type: ignore[assignment, func-returns-value]
    # Of the other stage are the parameters of the first optimizer.
    optimizer = ChainedOptimizer(Factored([{"params": []}]), torch.optim.AdamW([parameter]))
    owned = {id(optimizer.param_groups[0]): Units.WHOLE}
    assert DistributedOptimizer(optimizer, reducer, owned=owned).exchanges == []
    assert calls == [context.axis("tp-dp-cp").name]


def test_what_is_said_and_refused() -> None:
    traffic = Traffic.total([Traffic(2**20, 400_000, (500_000, 300_000)), Traffic(0, 5, (5,))])
    said = describe_owners(["SOAP"], traffic)
    assert "SOAP reads full tensors, so one of 2 ranks owns and steps each" in said
    assert "1.0 MiB" in said and "500,005 elements (1.25 x the mean" in said and "7.6 MiB" in said
    assert Traffic(0, 2**21, (2**22, 0)).peak_bytes == 2 * 4 * (2**22 + 2**21)  # messages of one
    assert "up to 3.8 MiB of experts" in describe_stack(["SOAP"], Traffic(0, 5, (5,), 10**6))
    check_owner_options(["SOAP"], DataParallelOptions(), is_stored=False)
    for options, stored, name in (
        ({}, True, "fp8_param_gather"),
        ({"optimizer_cpu_offload": True}, False, "optimizer_cpu_offload"),
        ({"moments_dtype": "bf16"}, False, "moments_dtype"),
        ({"overlap_param_gather": True}, False, "overlap_param_gather"),
    ):
        with pytest.raises(ConfigError, match=f"SOAP reads full tensors.*{name}"):
            check_owner_options(["SOAP"], DataParallelOptions(**options), is_stored=stored)


def test_tensors_inside_of_a_state() -> None:
    value = {"sides": [torch.ones(2), None, (torch.zeros(3), 1)], "at": 4, "none": []}
    tensors, frame = flattened("GG", value)
    assert list(tensors) == ["GG#0", "GG#1"] and frame["at"] == 4 and frame["none"] == []
    again = filled("GG", frame, dict(tensors).pop)
    assert again["sides"][1] is None and torch.equal(again["sides"][2][0], torch.zeros(3))
    assert filled("GG", value, dict(tensors).pop)["sides"][0] is value["sides"][0]  # an older file
