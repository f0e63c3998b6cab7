"""Modules with habits of their own under ``data_parallel="fsdp"``: hooks, parametrizations, shared
and unused parameters.

1e-5 relative: fp32 sums over ranks in another order, amplified a little by AdamW. Where a hook is
lost, a copy forgotten or a gradient dropped, the norms differ by tens of percent.
"""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.data import DataLoader

from megatron_lightning.config import DataParallelOptions
from tests.helpers.layouts import fit
from tests.helpers.ranks import run_ranks

WIDTH, BATCH, STEPS = 6, 8, 4
RTOL = 1e-5
RESHARD = DataParallelOptions(reshard_after_forward=True)
EVERY = DataParallelOptions(reduce_every_microbatch=True)
BOTH = DataParallelOptions(reshard_after_forward=True, reduce_every_microbatch=True)


class _Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(_Unit() for _ in range(3))

    def pipeline_units(self) -> list[str]:
        return [f"units.{index}" for index in range(len(self.units))]

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


class _Module(pl.LightningModule):
    """Sees ``x`` [b, WIDTH], whose first entry is a tenth of a number of the sample."""

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(1)
            self.net = _Net()
            self.change()

    def change(self) -> None:
        """Give the net its habits, before anything is sharded."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch), torch.roll(batch, 1, dims=1).sin())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class _ScalingHooks(_Module):
    """Hooks of parameters, of which one is taken away again and one comes when training starts."""

    def change(self) -> None:
        first, second = self.net.units[0], self.net.units[1]
        first.inner.weight.register_hook(lambda gradient: gradient * 3.0)
        first.outer.bias.register_hook(lambda gradient: gradient * torch.arange(WIDTH))
        self.removed = second.inner.weight.register_hook(lambda gradient: gradient * 100.0)

    def on_train_start(self) -> None:
        self.removed.remove()
        self.net.units[2].inner.weight.register_hook(lambda gradient: gradient * -2.0)


def _clamp(parameter: Tensor) -> None:
    parameter.grad.clamp_(-0.01, 0.01)


class _ClampingHook(_ScalingHooks):
    """One more, which sees what autograd has added up."""

    def change(self) -> None:
        super().change()
        self.net.units[1].outer.weight.register_post_accumulate_grad_hook(_clamp)


class _ModuleHooks(_Module):
    """Hooks of modules: before and after their forward and backward, on units and inside them."""

    def change(self) -> None:
        first, second, third = self.net.units
        first.register_forward_pre_hook(lambda module, args: (args[0] * module.inner.weight.sum(),))
        first.inner.register_forward_hook(lambda module, args, output: output * 1.5)
        second.register_full_backward_hook(
            lambda module, inputs, outputs: (inputs[0] * 2.0,) if inputs[0] is not None else None
        )
        second.outer.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 0.5,))
        third.register_forward_hook(
            lambda module, args, output: output + module.outer.weight.mean()
        )


class _Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.abs()


class _Parametrized(_Module):
    """Weights that are computed from others, in torch's new way and in its old one."""

    def change(self) -> None:
        first, second, third = self.net.units
        weight_norm(first.inner)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.weight_norm(second.outer)
        register_parametrization(third.inner, "weight", _Squared())


class _Shared(_Module):
    """Parameters under two names: inside a unit, in two units, and a module that a unit calls
    twice."""

    def change(self) -> None:
        first, second, third = self.net.units
        first.again = first.inner
        second.outer.weight = third.outer.weight
        third.outer.bias = nn.Parameter(torch.zeros(WIDTH))
        third.register_forward_hook(
            lambda module, args, output: output + module.outer(torch.tanh(module.inner(output)))
        )


class _Branches(_Module):
    """Each sample uses the weights that its number chooses; odd ones do not get to the first unit,
    and some are never used."""

    def change(self) -> None:
        second = self.net.units[1]
        second.other, second.never = nn.Linear(WIDTH, 7), nn.Linear(3, 3)
        self.never = second.never.weight.detach().clone()

        def forward(x: Tensor) -> Tensor:
            chosen = second.other if _is_odd(x) else second.inner
            return x + second.outer(torch.tanh(chosen(x)))

        second.forward = forward

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.net.units[0](batch)
        x = torch.cat([batch[:, :1], (x.detach() if _is_odd(batch) else x)[:, 1:]], dim=1)
        return F.mse_loss(self.net.units[2](self.net.units[1](x)), batch.sin())

    def on_train_end(self) -> None:
        weight = self.net.units[1].never.weight
        assert torch.equal(
            weight.full_tensor() if isinstance(weight, DTensor) else weight, self.never
        )


def _is_odd(x: Tensor) -> bool:
    return round(x[0, 0].item() * 10) % 2 == 1


def _samples() -> list[Tensor]:
    x = torch.randn(STEPS * BATCH, WIDTH, generator=torch.Generator().manual_seed(2))
    # Of two ranks, which take turns, one has the even samples at first; later all ranks have both
    # kinds.
    number = torch.arange(STEPS * BATCH) // torch.tensor([1, 2]).repeat_interleave(
        STEPS * BATCH // 2
    )
    x[:, 0] = number / 10
    return list(x)


def _train(kind: type[_Module], world: int, options: dict[str, Any]) -> list[float]:
    loader = DataLoader(_samples(), batch_size=BATCH // world)
    return fit(options or None, kind(), loader, steps=STEPS, gradient_clip_val=1.0).norms


def _train_all(world: int, cases: list[tuple[type[_Module], dict[str, Any]]]) -> list[list[float]]:
    return [_train(kind, world, options) for kind, options in cases]


MICRO = {"micro_batch_size": 1}
FSDP = {"data_parallel": "fsdp"}
KINDS: tuple[type[_Module], ...] = (_ScalingHooks, _ModuleHooks, _Parametrized, _Shared)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_habits_of_modules_survive_sharding(world: int) -> None:
    cases = [
        (kind, {**FSDP, **more})
        for kind in KINDS
        for more in ({}, {**MICRO, "data_parallel_options": BOTH})
    ]
    expected = dict(
        zip(KINDS, run_ranks(1, _train_all, 1, [(kind, {}) for kind in KINDS])[0], strict=True)
    )
    for rank in run_ranks(world, _train_all, world, cases, timeout_s=100):
        for (kind, options), norms in zip(cases, rank, strict=True):
            assert norms == pytest.approx(expected[kind], rel=RTOL), (kind.__name__, options)


@pytest.mark.slow
def test_a_hook_sees_what_it_sees_under_zero1() -> None:
    """The whole parameter with this rank's sum over micro-batches, before it is reduced: a clamp
    does not commute with that."""
    reshard = {**MICRO, "data_parallel_options": RESHARD}
    modes = [
        FSDP,
        {**FSDP, **MICRO},
        {**FSDP, **reshard},
        {"data_parallel": "zero1"},
        {"data_parallel": "zero1", **MICRO},
    ]
    native, micro, resharded, *expected = run_ranks(
        2, _train_all, 2, [(_ClampingHook, mode) for mode in modes]
    )[0]
    assert native == pytest.approx(expected[0], rel=RTOL)
    assert micro == resharded == pytest.approx(expected[1], rel=RTOL)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_may_use_different_parameters_of_a_unit(world: int) -> None:
    """As with one process, a parameter that no rank has used is not stepped: a zero gradient would
    decay it."""
    options = [
        {},
        {"data_parallel_options": RESHARD},
        {"data_parallel_options": EVERY},
        {"data_parallel_options": BOTH},
    ]
    if world == 4:
        options.append(
            {"data_parallel_options": DataParallelOptions(num_distributed_optimizer_instances=2)}
        )
    cases = [(_Branches, {**FSDP, **MICRO, **more}) for more in options]
    expected = run_ranks(1, _train_all, 1, [(_Branches, MICRO)])[0][0]
    for rank in run_ranks(world, _train_all, world, cases, timeout_s=100):
        for (_, chosen), norms in zip(cases, rank, strict=True):
            assert norms == pytest.approx(expected, rel=RTOL), chosen


class _LeavesOut(_Module):
    """From a step on, one rank does without the second unit."""

    since = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.net.units[0](batch)
        if batch_idx < self.since or self.global_rank == 0:
            x = self.net.units[1](x)
        return self.net.units[2](x).square().mean()


class _LeavesOutLater(_LeavesOut):
    since = 2


class _EndsEarly(_LeavesOut):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.net.units[0](batch)
        return (self.net.units[1](x) if self.global_rank == 0 else x).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, MICRO], ids=["native", "micro-batches"])
def test_a_rank_that_leaves_out_a_unit_is_named(options: dict[str, Any]) -> None:
    """At first by both ranks; later by that rank alone, while the other waits for it."""
    messages = []
    for kind in (_LeavesOut, _EndsEarly, _LeavesOutLater):
        with pytest.raises(AssertionError) as caught:
            run_ranks(2, _train, kind, 2, {**FSDP, **options})
        messages.append(str(caught.value))
    left_out, ended, later = messages
    assert "rank 0 calls net.units.1 (with the parameters net.units.1.inner.weight, " in left_out
    assert "rank 1 calls net.units.2 (with" in left_out and 'set data_parallel="zero1"' in left_out
    assert "rank 0 calls net.units.1 (with" in ended and "rank 1 ends its forward" in ended
    assert "rank 1 calls net.units.2 (with" in later
    assert "until now every data-parallel rank calls net.units.1 (with" in later
