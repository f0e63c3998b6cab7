"""Buffers that begin to change in the middle of an epoch: before every step all ranks have those of
the first one, as under Lightning's DistributedDataParallel.

Tolerances: fp32 sums over ranks are taken in another order (1e-5 relative).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from megatron_lightning.config import PipelineOptions
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

STEPS, BEGIN, WIDTH = 8, 4, 6
# How a module writes a running mean `mean` of its input's `new` one.
WRITES: dict[str, Any] = {
    "in_place": lambda stat, new: stat.mean.mul_(0.5).add_(new, alpha=0.5),
    "replaced": lambda stat, new: setattr(stat, "mean", 0.5 * stat.mean + 0.5 * new),
    "copied": lambda stat, new: stat.mean.copy_(0.5 * stat.mean + 0.5 * new),
}


class Statistic(nn.Module):
    """Subtracts a running mean and adds how often the input was large, as codebooks count."""

    mean: Tensor
    count: Tensor
    unused: Tensor

    def __init__(self, write: str) -> None:
        super().__init__()
        self.write = write
        self.is_active = False
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("unused", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out = x - self.mean + 0.01 * self.count.sum()
        if self.training and self.is_active:
            with torch.no_grad():
                WRITES[self.write](self, x.mean(0))
                self.count[1] += (x > 0.5).sum()
        return out


class Net(nn.Sequential):
    def __init__(self, write: str) -> None:
        super().__init__(
            nn.Linear(4, WIDTH), Statistic(write), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH),
            nn.Linear(WIDTH, 4),
        )  # fmt: skip


class Module(pl.LightningModule):
    """From step BEGIN on the statistics are updated; before, BatchNorm is frozen.

    ``rank``: the only rank that updates; None: all do.
    """

    def __init__(self, write: str, rank: int | None = None) -> None:
        super().__init__()
        self.net = Net(write)
        self.head = Statistic(write)  # outside of pipeline units
        self.rank = rank
        self.seen: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        active = batch_idx >= BEGIN and self.rank in (None, dist.get_rank())
        for module in self.modules():
            if isinstance(module, Statistic):
                module.is_active = active
            elif isinstance(module, nn.BatchNorm1d):
                module.train(active)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx and batch_idx not in self.seen:
            self.seen[batch_idx] = {n: b.clone() for n, b in self.named_buffers()}
        out = torch.nn.functional.pad(self.net(batch), (0, WIDTH - 4))
        return (self.head(out) - 1.0).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _train(options: dict[str, Any] | None, write: str, rank: int | None = None) -> dict[str, Any]:
    """Return the buffers before every step, and the weights at the end."""
    torch.manual_seed(1)
    module = Module(write, rank)
    shares = dist.get_world_size()
    strategy: Any = "ddp" if options is None else MegatronStrategy(**options)
    if options is not None:
        shares //= options.get("pipeline_model_parallel_size", 1)
        shares //= options.get("tensor_model_parallel_size", 1)
    data = torch.randn(STEPS * 8, 4, generator=torch.Generator().manual_seed(3))
    data *= torch.arange(1, len(data) + 1)[:, None] / 16  # replicas differ
    # Lightning's own sampler shuffles.
    sampler = DistributedSampler(data, shuffle=False) if options is None else None  # type: ignore[arg-type, var-annotated]
    loader = DataLoader(data, batch_size=8 // shares, sampler=sampler)  # type: ignore[arg-type]
    fit = trainer(strategy, max_epochs=1, use_distributed_sampler=options is not None)
    fit.fit(module, loader)
    weights = {n: p.detach() for n, p in module.named_parameters()}
    if options and options.get("data_parallel") == "fsdp":
        weights = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in weights.items()}
    return {"seen": module.seen, "weights": weights}


@cache
def _ddp(write: str, rank: int | None = None) -> list[dict[str, Any]]:
    return run_ranks(2, _train, None, write, rank)


def _check(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for rank in found:
        assert rank["seen"].keys() == set(range(1, STEPS))
        for step, buffers in rank["seen"].items():
            for name, buffer in buffers.items():
                torch.testing.assert_close(
                    buffer, expected["seen"][step][name], rtol=1e-5, atol=1e-6,
                    msg=lambda text, step=step, name=name: f"{name} before step {step}: {text}",
                )  # fmt: skip
        for name, weight in rank["weights"].items():
            if weight.numel():
                torch.testing.assert_close(weight, expected["weights"][name], rtol=1e-5, atol=1e-6)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("mode", "write"),
    [("zero1", "in_place"), ("ddp", "replaced"), ("fsdp", "copied")]
    + [
        pytest.param(mode, write, marks=pytest.mark.slow)
        for mode, write in (("zero1", "replaced"), ("ddp", "in_place"), ("ddp", "copied"))
    ],
)
def test_replicas_have_the_buffers_of_the_first(mode: str, write: str) -> None:
    found = run_ranks(2, _train, {"data_parallel": mode}, write)
    _check(found, _ddp(write)[0])


@pytest.mark.slow
def test_stages_have_the_buffers_of_the_last() -> None:
    """Buffers of units, and outside of them, where they are equal after a step already."""
    units = PipelineOptions(units=[str(index) for index in range(5)])
    options = {"pipeline_model_parallel_size": 2, "pipeline_options": units}
    found = run_ranks(4, _train, options, "in_place")
    _check(found, _ddp("in_place")[0])


@pytest.mark.slow
def test_a_buffer_between_the_units_of_a_pipeline_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"buffer net\.1\.\w+ is written .* no unit of the"):
        run_ranks(2, _train, {"pipeline_model_parallel_size": 2}, "in_place")


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_alone_may_begin(rank: int) -> None:
    """The other one learns of it a step later; it has the first rank's values from then on."""
    found = run_ranks(2, _train, {}, "in_place", rank)
    expected = _ddp("in_place", rank)[0]["seen"]
    for step in range(1, STEPS):
        if step == BEGIN + 1:
            continue
        for of_rank in found:
            for name, buffer in of_rank["seen"][step].items():
                torch.testing.assert_close(buffer, found[0]["seen"][step][name], rtol=0, atol=0)
        for name, buffer in found[0]["seen"][step].items():  # of its own step behind by one
            torch.testing.assert_close(buffer, expected[step][name], rtol=0.1, atol=2)
