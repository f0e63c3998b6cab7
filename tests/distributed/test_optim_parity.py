"""Data-parallel training, whole and sharded, equals training on one process with the same global
batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.config import DataParallelOptions
from megatron_lightning.optim import (
    DistributedOptimizer,
    GradientReducer,
    clip_grads_by_norm_,
    global_grad_norm,
)
from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.parallel.shards.sharding import named_shard_specs
from tests.helpers.ranks import run_ranks

NUM_SAMPLES, NUM_STEPS = 8, 4

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adamw-fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "adamw-loop": (torch.optim.AdamW, {"lr": 1e-2, "foreach": False, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
}


class Model(nn.Module):
    """Odd sizes, a scalar, a tensor smaller than the number of ranks, a frozen and two unused
    parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.tiny = nn.Parameter(torch.randn(3))
        self.unused = nn.Linear(5, 3)
        self.frozen = nn.Linear(13, 13)
        self.frozen.requires_grad_(False)
        self.sometimes = nn.Linear(13, 13)
        self.last = nn.Linear(13, 3, bias=False)

    def forward(self, x: Tensor, *, use: bool = True) -> Tensor:
        hidden = self.frozen(torch.tanh(self.first(x))) * self.scale
        return self.last(hidden + self.sometimes(hidden) if use else hidden) + self.tiny


def make(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(7)
    return Model().to(dtype)


def data(step: int) -> Tensor:
    return torch.randn(NUM_SAMPLES, 7, generator=torch.Generator().manual_seed(step))


def make_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    cls, options = OPTIMIZERS[name]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return cls([{"params": matrices}, {"params": others, "weight_decay": 0.0}], **options)


def loss_of(model: Model, x: Tensor, sample: int, *, sometimes: bool) -> Tensor:
    # Sample 5 alone uses `sometimes`: with several ranks, some lack a gradient that others have.
    dtype = model.tiny.dtype
    return (
        model(x[sample : sample + 1].to(dtype), use=sometimes and sample == 5)
        .float()
        .square()
        .mean()
    )


def weights_of(model: nn.Module) -> dict[str, np.ndarray]:
    return {
        name: parameter.detach().float().numpy().copy()
        for name, parameter in model.named_parameters()
    }


def train(
    name: str,
    sharded: bool,
    num_micro: int,
    flushes: int,
    dtype: torch.dtype,
    options: DataParallelOptions,
    cp: int = 1,
) -> dict[str, Any]:
    """Train on this rank's part of every batch; with one rank and fp32 this is ordinary
    training."""
    context = ParallelContext(ParallelLayout(context_parallel_size=cp))
    model, group = make(dtype), context.dp_cp
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    specs = named_shard_specs(model)
    reducer = GradientReducer(trainable, specs, context, sharded=sharded, options=options)
    optimizer = make_optimizer(model, name)
    DistributedOptimizer(optimizer, reducer, dict(model.named_parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    per_rank = NUM_SAMPLES // group.size
    norms = []
    for step in range(NUM_STEPS):
        x = data(step)
        reducer.begin_step()
        for micro in range(num_micro):
            samples = range(
                group.rank * per_rank + micro * per_rank // num_micro,
                group.rank * per_rank + (micro + 1) * per_rank // num_micro,
            )
            reducer.sync = micro == num_micro - 1
            loss = (
                sum((loss_of(model, x, i, sometimes=step != 1) for i in samples), torch.zeros(()))
                / per_rank
            )
            loss.backward()
            # What Lightning does between flush and backward.
            if (micro + 1) % (num_micro // flushes) == 0:
                reducer.hide()
                model.zero_grad()
                reducer.publish()
        reducer.finish(1.0 / group.size)
        gradients = reducer.gradients()
        norm = global_grad_norm(reducer.counted(), context, sharded=reducer.sharded)
        clip_grads_by_norm_(gradients.values(), 0.7, norm)
        optimizer.step()
        scheduler.step()
        norms.append(float(norm))
    weights = {p.data_ptr() for p in model.parameters()}
    state = [
        value for states in optimizer.state.values() for value in states.values() if value.dim() > 0
    ]
    return {
        "weights": weights_of(model),
        "norms": norms,
        "moments": {value.dtype for value in state},
        "state_on": {value.device.type for value in state},
        "steps_weights": any(p.data_ptr() in weights for p in optimizer.state),
    }


def reference(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Ordinary training; half-precision weights are rounded copies of fp32 ones."""
    model, low = make(dtype).float(), make(dtype)
    optimizer = make_optimizer(model, name)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    norms = []
    for step in range(NUM_STEPS):
        low.zero_grad()
        optimizer.zero_grad()
        for sample in range(NUM_SAMPLES):
            (loss_of(low, data(step), sample, sometimes=step != 1) / NUM_SAMPLES).backward()
            for master, parameter in zip(model.parameters(), low.parameters(), strict=True):
                if parameter.grad is not None:
                    master.grad = parameter.grad.float() + (
                        0 if master.grad is None else master.grad
                    )
                    parameter.grad = None
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)))
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for master, parameter in zip(model.parameters(), low.parameters(), strict=True):
                parameter.copy_(master)
    return {"weights": weights_of(low), "norms": norms}


def check(results: list[dict[str, Any]], expected: dict[str, Any], tolerance: float) -> None:
    for result in results:
        assert result["norms"] == pytest.approx(expected["norms"], rel=tolerance)
        for name, weight in expected["weights"].items():
            # Ranks agree to the bit.
            assert np.array_equal(result["weights"][name], results[0]["weights"][name]), name
            np.testing.assert_allclose(
                result["weights"][name], weight, rtol=tolerance, atol=tolerance, err_msg=name
            )


CASES = [
    # optimizer, sharded, ranks, micro-batches, flushes, bucket size
    ("adamw", False, 2, 2, 1, 100),
    ("adamw", True, 2, 1, 1, 100),
    ("adamw", True, 4, 2, 2, 1),
    ("adamw", True, 4, 2, 1, 10**9),
    ("adamw-fused", True, 2, 1, 1, 300),
    ("adamw-loop", True, 4, 1, 1, 100),
    ("sgd", True, 4, 2, 1, 100),
    ("sgd", False, 4, 1, 1, 1),
    ("rmsprop", True, 2, 2, 1, 100),
    ("adagrad", True, 4, 1, 1, 100),
    ("adamw", True, 1, 4, 2, 100),
]


# fp32: only the order of the summation over samples differs, and Adam divides by the square root of
# small second moments.
@pytest.mark.spread(3)
@pytest.mark.parametrize(("name", "sharded", "ranks", "micro", "flushes", "bucket"), CASES)
def test_equals_one_process(
    name: str, sharded: bool, ranks: int, micro: int, flushes: int, bucket: int
) -> None:
    options = DataParallelOptions(bucket_size=bucket)
    results = run_ranks(ranks, train, name, sharded, micro, flushes, torch.float32, options)
    check(results, reference(name), 1e-6)


@pytest.mark.spread(1)
@pytest.mark.parametrize(("instances", "cp"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_hybrid_shards_equal_one_process(instances: int, cp: int) -> None:
    """Sharded among 4 / ``instances`` neighbours, of both axes, and replicated over the rest: the
    same training and norm."""
    options = DataParallelOptions(bucket_size=100, num_distributed_optimizer_instances=instances)
    results = run_ranks(4, train, "adamw", True, 2, 1, torch.float32, options, cp)
    check(results, reference("adamw"), 1e-6)


# A gradient rounds to bf16 once before it is sent and once in the sum of two: 2^-8 relative; the
# norm averages that out, and Adam's update, about lr whatever the gradient's size, changes by as
# much (4 steps of 1e-2 on weights of about 0.3).
@pytest.mark.parametrize("sharded", [True, False])
def test_gradients_sent_as_bf16(sharded: bool) -> None:
    options = DataParallelOptions(bucket_size=100, grad_reduce_in_bf16=True)
    results = run_ranks(2, train, "adamw", sharded, 4, 1, torch.float32, options)
    expected = reference("adamw")
    check(results, expected, 2**-8)
    # Else nothing was rounded.
    assert results[0]["norms"] != pytest.approx(expected["norms"], rel=1e-6)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("name", "sharded", "ranks"), [("adamw", True, 2), ("adamw-fused", False, 1), ("sgd", True, 1)]
)
def test_optimizer_on_the_cpu_equals_one_process(name: str, sharded: bool, ranks: int) -> None:
    """Gradients go to host memory before the step and the stepped values come back, fp32 parameters
    included."""
    options = DataParallelOptions(bucket_size=100, optimizer_cpu_offload=True)
    results = run_ranks(ranks, train, name, sharded, 2, 1, torch.float32, options)
    check(results, reference(name), 1e-6)
    assert all(result["state_on"] == {"cpu"} and not result["steps_weights"] for result in results)


# Moments round to bf16 after every step, 2^-9 relative to the nearest; Adam divides one by the root
# of the other, so that an update of about lr changes by less than 2^-8 of itself, and 4 steps of
# 1e-2 by 2e-4.
@pytest.mark.parametrize(("name", "sharded", "ranks"), [("adamw", True, 2), ("sgd", False, 1)])
@pytest.mark.filterwarnings("ignore:moments_dtype")
def test_moments_in_bf16(name: str, sharded: bool, ranks: int) -> None:
    options = DataParallelOptions(bucket_size=100, moments_dtype="bf16")
    results = run_ranks(ranks, train, name, sharded, 2, 1, torch.float32, options)
    check(results, reference(name), 1e-2 if name == "sgd" else 2e-4)
    assert all(result["moments"] == {torch.bfloat16} for result in results)


# bf16: gradients are rounded per sample as in the reference, then summed in fp32; a weight may
# round to the next bf16 value (2^-8 relative) where the masters differ in the last fp32 digit.
@pytest.mark.spread(1)
@pytest.mark.parametrize(("sharded", "ranks"), [(True, 4), (False, 2), (True, 1)])
def test_half_precision_weights_have_fp32_masters_and_gradients(sharded: bool, ranks: int) -> None:
    micro = NUM_SAMPLES // ranks  # one sample a micro-batch, as in the reference
    results = run_ranks(
        ranks,
        train,
        "adamw",
        sharded,
        micro,
        1,
        torch.bfloat16,
        DataParallelOptions(bucket_size=100),
    )
    expected = reference("adamw", torch.bfloat16)
    check(results, expected, 2**-8)
    wrong = sum(int((results[0]["weights"][n] != w).sum()) for n, w in expected["weights"].items())
    assert wrong <= 2, f"{wrong} weights are not bit-equal"
