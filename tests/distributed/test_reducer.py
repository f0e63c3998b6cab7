"""Reduction over tensor, pipeline and data axes, its norm, the bytes it moves, and its contract
with the caller."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lightning.config import DataParallelOptions
from megatron_lightning.errors import PipelineError
from megatron_lightning.optim import DistributedOptimizer, GradientReducer, global_grad_norm
from megatron_lightning.parallel import ParallelContext, ParallelLayout, ShardSpec
from megatron_lightning.parallel.shards.spec import Box
from tests.helpers.ranks import run_ranks


def context_of(tp: int = 1, pp: int = 1) -> ParallelContext:
    return ParallelContext(
        ParallelLayout(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    )


def parameters_and_specs(
    context: ParallelContext,
) -> tuple[dict[str, nn.Parameter], dict[str, ShardSpec]]:
    """One parameter of each kind: sharded over tp, replicated, partial over tp, tied between the
    pipeline's ends."""
    tp, pp = context.tp, context.pp
    specs = {
        f"stage{pp.rank}.sharded": ShardSpec.split((6, 5), dim=0, size=tp.size, rank=tp.rank),
        f"stage{pp.rank}.replicated": ShardSpec.replicated((7,)),
        f"stage{pp.rank}.partial": ShardSpec.replicated((3, 3), partial_over=("tp",)),
    }
    table = ShardSpec.split((4, 3), dim=0, size=tp.size, rank=tp.rank)
    copy = ShardSpec(table.global_shape, table.boxes, table.sharded_over, tied_to="table")
    if pp.rank == 0:
        specs = {"table": table, **specs}
    if pp.size > 1 and pp.rank == pp.size - 1:
        specs["head"] = copy
    return {name: nn.Parameter(torch.ones(spec.local_shape)) for name, spec in specs.items()}, specs


def local_gradient(name: str, context: ParallelContext, whole: bool = False) -> Tensor:
    """Gradient of one rank: a formula of the global index, its data rank and, for partial ones, its
    tp rank."""
    local_name = name.rpartition(".")[2]
    shape = {
        "sharded": (6, 5),
        "replicated": (7,),
        "partial": (3, 3),
        "table": (4, 3),
        "head": (4, 3),
    }[local_name]
    base = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) - 3
    if local_name == "head":
        base = base * 0.5
    if local_name == "partial":
        base = base * (context.tp.rank + 1)
    gradient = base * (context.dp_cp.rank + 1)
    if whole or context.tp.size == 1 or local_name in ("replicated", "partial"):
        return gradient
    rows = shape[0] // context.tp.size
    return gradient[context.tp.rank * rows : (context.tp.rank + 1) * rows]


def expected_gradient(name: str, context: ParallelContext) -> Tensor:
    """The mean over data ranks of the sum over the other axes, cut to this rank's part."""
    n, local_name = context.dp_cp.size, name.rpartition(".")[2]
    gradient = local_gradient(name, context) / (context.dp_cp.rank + 1) * (n * (n + 1) / 2) / n
    if local_name == "partial":
        gradient = gradient / (context.tp.rank + 1) * (context.tp.size * (context.tp.size + 1) / 2)
    if context.pp.size > 1 and local_name in ("table", "head"):
        gradient = gradient * (3.0 if local_name == "head" else 1.5)  # 1 x owner + 0.5 x copy
    return gradient


def global_norm(context: ParallelContext, order: float) -> float:
    parts = []
    for stage in range(context.pp.size):
        for name in ("sharded", "replicated", "partial", *(("table",) if stage == 0 else ())):
            n = context.dp_cp.size
            gradient = (
                local_gradient(name, context, whole=True) / (context.dp_cp.rank + 1) * (n + 1) / 2
            )
            if name == "partial":
                gradient = (
                    gradient / (context.tp.rank + 1) * (context.tp.size * (context.tp.size + 1) / 2)
                )
            if name == "table" and context.pp.size > 1:
                gradient = gradient * 1.5
            parts.append(gradient.flatten())
    return float(torch.linalg.vector_norm(torch.cat(parts), order))


def reduce_everything(tp: int, pp: int, sharded: bool, bucket_size: int) -> None:
    context = context_of(tp, pp)
    parameters, specs = parameters_and_specs(context)
    reducer = GradientReducer(
        parameters,
        specs,
        context,
        sharded=sharded,
        options=DataParallelOptions(bucket_size=bucket_size),
    )
    for _ in range(2):  # a second window must not see the first
        reducer.begin_step()
        for sync in (False, True):  # two micro-batches of half the gradient each
            reducer.sync = sync
            sum(
                (p * local_gradient(n, context) / 2).sum() for n, p in parameters.items()
            ).backward()
        reducer.hide()
        assert all(p.grad is None for p in parameters.values())
        reducer.publish()
        reducer.finish(1.0 / context.dp_cp.size)
        gradients = reducer.gradients()
        for name, gradient in gradients.items():
            expected = expected_gradient(name, context)
            shard = reducer.shards.get(name)
            if shard is not None and not shard.is_full:
                expected = expected.flatten()[shard.start : shard.start + gradient.numel()]
            torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=0, msg=name)
            full = not sharded or context.dp_cp.size == 1
            assert (parameters[name].grad is not None) == full
            assert not full or parameters[name].grad.shape == parameters[name].shape  # type: ignore[union-attr]
        numel = torch.tensor(sum(g.numel() for g in gradients.values()))
        if sharded and context.dp_cp.process_group is not None:
            # The fragments cover every parameter once.
            dist.all_reduce(numel, group=context.dp_cp.process_group)
        assert int(numel) == sum(p.numel() for p in parameters.values())
        for order in (2.0, math.inf, 1.0):
            items = [(g, specs[n]) for n, g in gradients.items()]
            norm = global_grad_norm(items, context, sharded=sharded, norm_type=order)
            assert float(norm) == pytest.approx(global_norm(context, order), rel=1e-6)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("ranks", "tp", "pp", "sharded", "bucket_size"),
    [
        (1, 1, 1, True, 10),
        (2, 1, 1, True, 10),
        (2, 2, 1, False, 1),
        (2, 1, 2, True, 10),
        (4, 2, 1, True, 1),
        (4, 2, 1, False, 1000),
        (4, 1, 2, True, 1000),
        (4, 2, 2, False, 10),
        pytest.param(8, 2, 2, True, 10, marks=pytest.mark.slow),
        pytest.param(8, 2, 4, False, 10, marks=pytest.mark.slow),
        pytest.param(8, 1, 2, True, 1, marks=pytest.mark.slow),
    ],
)
def test_sums_over_every_axis_and_norm(
    ranks: int, tp: int, pp: int, sharded: bool, bucket_size: int
) -> None:
    run_ranks(ranks, reduce_everything, tp, pp, sharded, bucket_size)


class CollectiveBytes(TorchDispatchMode):
    """Counts the bytes that a rank gives to each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            buffer = args[1] if "reduce_scatter" in str(func) else first
            self.calls.append((str(func).split(".")[1], buffer.nbytes))
        return func(*args, **(kwargs or {}))


def count_bytes(sharded: bool, dtype: torch.dtype) -> tuple[list[tuple[str, int]], dict[str, int]]:
    context = context_of()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 50), nn.Linear(50, 10)).to(dtype)
    parameters = dict(model.named_parameters())
    specs = {name: ShardSpec.replicated(p.shape) for name, p in parameters.items()}
    reducer = GradientReducer(
        parameters, specs, context, sharded=sharded, options=DataParallelOptions(bucket_size=1500)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    DistributedOptimizer(optimizer, reducer)
    with CollectiveBytes() as counted:
        reducer.begin_step()
        for micro in range(3):
            reducer.sync = micro == 2
            model(torch.ones(2, 40, dtype=dtype)).sum().backward()
            overlapped = len(counted.calls)
        reducer.finish(1.0)
        optimizer.step()
    # All reductions were under way before backward returned.
    assert overlapped == len(reducer.buckets) == 2
    return counted.calls, dict(reducer.bytes_communicated)


@pytest.mark.spread(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [False, True])
def test_bytes_equal_theory(sharded: bool, dtype: torch.dtype) -> None:
    # Buckets close at 1500 elements, in reverse: (510 + 1550), 1200 + 30 …; every parameter starts
    # at a multiple of 64 and a sharded bucket ends at a multiple of 128. Gradients travel in fp32
    # once per step, whatever the micro-batches.
    def padded(*numels: int) -> int:
        size = sum(-(-n // 64) * 64 for n in numels)
        return -(-size // 128) * 128 if sharded else size

    buckets = [padded(10, 500, 50, 1500), padded(30, 1200)]
    calls, counted = run_ranks(2, count_bytes, sharded, dtype)[0]
    reductions = [
        ("_reduce_scatter_base_" if sharded else "allreduce_", 4 * size) for size in buckets
    ]
    gathers = (
        [("_allgather_base_", dtype.itemsize * size) for size in reversed(buckets)]
        if sharded
        else []
    )
    flags = ("allreduce_", 6)  # one byte a parameter: who used it
    assert calls == [*reductions, flags, *gathers]
    assert sum(counted.values()) == sum(size for _, size in calls)


def count_hybrid_bytes() -> tuple[list[tuple[str, int]], dict[str, int]]:
    context = context_of()
    parameters = {name: nn.Parameter(torch.ones(1024)) for name in ("a", "b", "c")}
    specs = {name: ShardSpec.replicated((1024,)) for name in parameters}
    options = DataParallelOptions(
        bucket_size=1000, grad_reduce_in_bf16=True, num_distributed_optimizer_instances=2
    )
    reducer = GradientReducer(parameters, specs, context, sharded=True, options=options)
    with CollectiveBytes() as counted:
        reducer.begin_step()
        reducer.sync = True
        sum((context.rank + 1) * p.sum() for p in parameters.values()).backward()
        reducer.finish(0.25)
    assert all(torch.equal(g, torch.full((512,), 2.5)) for g in reducer.gradients().values())
    return counted.calls, dict(reducer.bytes_communicated)


def test_hybrid_reduction_sends_shards_between_neighbourhoods() -> None:
    """Each bucket is scattered among 2 neighbours, and its half all-reduced while the next bucket
    is under way."""
    scatter, spread, flags = (
        ("_reduce_scatter_base_", 2 * 1024),
        ("allreduce_", 2 * 512),
        ("allreduce_", 3),
    )
    for calls, counted in run_ranks(4, count_hybrid_bytes):
        assert calls == [scatter, spread, scatter, spread, scatter, flags, spread]
        assert counted == {"reduce_scatter": 3 * 2048, "all_reduce": 3 * 1024 + 3}


def unused_on_some_ranks(sharded: bool) -> dict[str, tuple[bool, float | None]]:
    context = context_of()
    parameters = {name: nn.Parameter(torch.ones(100)) for name in ("always", "rank1", "never")}
    specs = {name: ShardSpec.replicated((100,)) for name in parameters}
    reducer = GradientReducer(
        parameters, specs, context, sharded=sharded, options=DataParallelOptions(bucket_size=1)
    )
    reducer.begin_step()
    reducer.sync = True
    loss = parameters["always"].sum()
    if context.rank == 1:
        loss = loss + parameters["rank1"].sum()
    loss.backward()
    reducer.finish(0.5)
    gradients = reducer.gradients()
    return {
        n: (n in gradients, float(gradients[n].mean()) if n in gradients else None)
        for n in parameters
    }


@pytest.mark.parametrize("sharded", [False, True])
def test_a_parameter_that_no_rank_used_has_no_gradient(sharded: bool) -> None:
    for result in run_ranks(2, unused_on_some_ranks, sharded):
        assert result["never"] == (False, None)
        assert result["always"][1] in (1.0, None) and result["rank1"][1] in (0.5, None)
        assert sharded or (result["always"][0] and result["rank1"][0])


def buckets_by_kind() -> None:
    """Parameters share a buffer that agree in dtype, replicas and partial sums; what backward
    computes first comes first."""
    context = context_of(tp=2)
    dtypes = {
        "a": torch.float32,
        "b": torch.bfloat16,
        "c": torch.float32,
        "d": torch.float64,
        "e": torch.bfloat16,
    }
    parameters = {name: nn.Parameter(torch.ones(10, dtype=dtype)) for name, dtype in dtypes.items()}
    specs = {name: ShardSpec.replicated((10,)) for name in parameters}
    for name, spec in (
        ("expert", replace(specs["a"], sharded_over=("ep",))),
        ("norm", ShardSpec.replicated((10,), partial_over=("tp",))),
        ("f", ShardSpec.replicated((10,))),
    ):
        parameters[name], specs[name] = nn.Parameter(torch.ones(10)), spec
    reducer = GradientReducer(parameters, specs, context, sharded=True)
    kinds = {
        ("f", "c", "a"): torch.float32,
        ("expert",): torch.float32,
        ("e", "b"): torch.float32,  # of bf16 parameters
        ("d",): torch.float64,
        ("norm",): torch.float32,  # summed over the tensor group first
    }
    assert {tuple(bucket.names): bucket.gradient.dtype for bucket in reducer.buckets} == kinds
    for bucket in reducer.buckets:
        assert bucket.gradient.numel() % (2 * 64) == 0 and bucket.value is not None
        assert bucket.value.dtype == bucket.parameters[0].dtype
        for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            assert parameter.data_ptr() == bucket.value[offset:].data_ptr() and offset % 64 == 0


def test_buckets_hold_parameters_of_one_kind() -> None:
    run_ranks(4, buckets_by_kind)


def started_in_backward() -> None:
    context = context_of()
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    parameters = dict(layers.named_parameters())
    specs = {name: ShardSpec.replicated(p.shape) for name, p in parameters.items()}
    reducer = GradientReducer(
        parameters, specs, context, sharded=True, options=DataParallelOptions(bucket_size=1)
    )
    assert [bucket.names for bucket in reducer.buckets] == [
        ["2.weight"],
        ["1.weight"],
        ["0.weight"],
    ]
    launched: list[list[bool]] = []
    reducer.begin_step()
    for sync in (False, True):  # two micro-batches
        reducer.sync = sync
        x = torch.ones(2, 8, requires_grad=True)
        hidden = layers[0](x)
        hidden.register_hook(
            lambda _: launched.append([bucket.launched for bucket in reducer.buckets])
        )
        layers[2](layers[1](hidden)).sum().backward()
    # Before backward has come to the first layer.
    assert launched == [[False] * 3, [True, True, False]]
    reducer.finish()


def test_reductions_start_in_the_last_backward_bucket_by_bucket() -> None:
    run_ranks(2, started_in_backward)


def misuse() -> None:
    context = context_of()
    parameter = nn.Parameter(torch.ones(4))
    reducer = GradientReducer(
        {"w": parameter}, {"w": ShardSpec.replicated((4,))}, context, sharded=False
    )
    reducer.begin_step()
    reducer.sync = True
    parameter.sum().backward()
    with pytest.raises(
        PipelineError, match=r"w received a gradient after .* Set sync only for the last backward"
    ):
        parameter.sum().backward()
    reducer.finish()
    with pytest.raises(PipelineError, match="finish\\(\\) was called twice"):
        reducer.finish()
    reducer.begin_step()
    # A user's zero_grad in the middle: what autograd then makes is still collected.
    parameter.grad = None
    parameter.sum().backward()
    reducer.finish()
    assert parameter.grad is not None and torch.equal(parameter.grad, torch.full((4,), 2.0))
    reducer.detach()
    parameter.sum().backward()
    assert torch.equal(parameter.grad, torch.ones(4))


def test_misuse_is_reported() -> None:
    run_ranks(2, misuse)


def tied_in_the_middle() -> None:
    """Words on all three ranks, positions on two of them, in other orders."""
    context = context_of(pp=3)
    rank, box = context.pp.rank, (Box((0,), (4,)),)
    held = {"words": (0, 1, 2), "positions": (1, 2)}
    parameters, specs = {}, {}
    for owner in sorted(held, reverse=rank > 1):
        if rank in held[owner]:
            name = owner if rank == held[owner][0] else f"copy.{owner}"
            parameters[name] = nn.Parameter(torch.ones(4))
            specs[name] = ShardSpec((4,), box, tied_to=None if name == owner else owner)
    reducer = GradientReducer(parameters, specs, context, sharded=False)
    reducer.begin_step()
    sum(parameter.sum() * (rank + 1) for parameter in parameters.values()).backward()
    reducer.finish()
    reducer.publish()
    for name, parameter in parameters.items():
        expected = 6.0 if name.endswith("words") else 5.0
        assert parameter.grad is not None and torch.equal(
            parameter.grad, torch.full((4,), expected)
        )


def test_copies_of_parameters_lie_on_any_ranks() -> None:
    run_ranks(3, tied_in_the_middle)


def test_one_rank_keeps_plain_gradients() -> None:
    context = context_of()
    model = nn.Linear(3, 2)
    parameters = dict(model.named_parameters())
    specs = {n: ShardSpec.replicated(p.shape) for n, p in parameters.items()}
    reducer = GradientReducer(parameters, specs, context, sharded=True)
    assert not reducer.buckets
    reducer.begin_step()
    model(torch.ones(1, 3)).sum().backward()
    reducer.hide()
    model.zero_grad()
    reducer.hide()  # a second time changes nothing
    reducer.publish()
    reducer.finish(torch.tensor(0.5))
    assert model.bias.grad is not None and torch.equal(model.bias.grad, torch.full((2,), 0.5))


def parts_are_reduced_apart(sharded: bool) -> None:
    """Two pipeline stages on one rank: the gradients of one travel when its last backward is done,
    however small it is."""
    context = context_of()
    names = ["0.a", "0.unused", "shared", "1.a", "1.unused"]
    parameters = {name: nn.Parameter(torch.ones(5)) for name in names}
    specs = {name: ShardSpec.replicated((5,)) for name in names}
    stage_of = {name: int(name[0]) for name in names if name != "shared"}
    reducer = GradientReducer(parameters, specs, context, sharded=sharded, stage_of=stage_of)
    reducer.late = frozenset({"shared"})
    reducer.begin_step()
    (parameters["0.a"].sum() + parameters["shared"].sum()).backward()  # an earlier micro-batch
    launched = []
    for stage in (1, 0):  # the last stage is done first
        reducer.sync = True
        ((stage + 1) * parameters[f"{stage}.a"].sum() + parameters["shared"].sum()).backward()
        reducer.sync = False
        reducer.complete(name for name, user in stage_of.items() if user == stage)
        launched.append(
            {name for bucket in reducer.buckets if bucket.launched for name in bucket.names}
        )
    assert launched[0] == {"1.a", "1.unused"}
    # What several stages share waits for the end, and with it what comes later in the order of all
    # ranks.
    assert "shared" not in launched[1]
    reducer.finish(1.0 / context.dp_cp.size)
    for name, expected in {"0.a": 2.0, "1.a": 2.0, "shared": 3.0}.items():
        shard = reducer.shards.get(name)
        if shard is not None:
            assert torch.equal(shard.target.grad, torch.full_like(shard.target.grad, expected)), (
                name
            )


@pytest.mark.parametrize("sharded", [False, True])
def test_parts_are_reduced_apart(sharded: bool) -> None:
    run_ranks(2, parts_are_reduced_apart, sharded)


def _norms_of_large_gradients() -> None:
    for size in ((4, 2**20), (2**19, 8), (1, 2**21 + 5)):
        gradient = torch.randn(size, generator=torch.Generator().manual_seed(0))
        items = [(gradient.t(), ShardSpec.replicated(gradient.t().shape))]
        for order in (2.0, 1.0, math.inf):
            norm = global_grad_norm(items, context_of(), sharded=False, norm_type=order)
            expected = float(torch.linalg.vector_norm(gradient.double(), order))
            assert float(norm) == pytest.approx(expected, rel=1e-6)


def test_norms_of_large_gradients_are_exact() -> None:
    """torch's own 2-norm on a CPU is 3e-5 too low for 2 million elements, and 7e-4 for 16."""
    run_ranks(1, _norms_of_large_gradients)
