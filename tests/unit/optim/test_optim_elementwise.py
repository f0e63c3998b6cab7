"""Which optimizers may be divided over ranks, and along which axes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.optim import ChainedOptimizer
from megatron_lightning.optim.stepping.chained import members
from megatron_lightning.optim.stepping.elementwise import (
    ELEMENTWISE,
    Division,
    Stepped,
    Trial,
    divide,
)
from megatron_lightning.optim.trials.probe import DIVISIONS, probe, trial_shapes
from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.parallel.shards.spec import ShardSpec

CPU = torch.device("cpu")


def parameters(*shapes: Sequence[int]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(*shape)) for shape in shapes or ((8, 6), (6,))]


def divided(
    optimizer: torch.optim.Optimizer,
    *,
    sharded: bool = False,
    tp: int = 1,
    pp: int = 1,
    num_ranks: int = 2,
    passed: set[Trial] | None = None,
    whole_tensors: bool = False,
) -> Division:
    """Divide ``optimizer`` on one rank of a layout that divides its matrices by their rows."""
    layout = ParallelLayout(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    context = ParallelContext(layout, planned_world_size=num_ranks)
    stepped = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            spec = ShardSpec.replicated(p.shape)
            if p.ndim > 1:
                spec = ShardSpec.split(p.shape, dim=0, size=tp, rank=0)
            stepped.append(Stepped(id(group), spec, sharded))
    return divide([(optimizer, stepped)], context, passed, whole_tensors=whole_tensors)


def check(optimizer: torch.optim.Optimizer, **layout: Any) -> list[str]:
    """Return the classes that are element-wise in a trial, if none reads full tensors."""
    division = divided(optimizer, **layout)
    assert not division.owned and not division.whole
    return list(division.tried)


def whole(optimizer: torch.optim.Optimizer, **layout: Any) -> list[str]:
    """Return the classes that read full tensors."""
    division = divided(optimizer, **layout)
    groups = {
        id(group)
        for member in members(optimizer)
        if type(member).__name__ in division.whole
        for group in member.param_groups
    }
    assert division.owned.keys() == groups
    return list(division.whole)


def differences(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the largest difference of every division."""
    group, found = optimizer.param_groups[0], dict.fromkeys(DIVISIONS, 0.0)
    shapes = [p.shape for p in group["params"]]
    for spread in probe(optimizer, group, list(DIVISIONS), shapes=shapes, device=CPU):
        found[spread.division] = max(found[spread.division], spread.difference)
    return found


@pytest.mark.spread(4)
@pytest.mark.parametrize("cls", sorted(ELEMENTWISE, key=lambda cls: cls.__name__))
def test_the_listed_optimizers_are_elementwise(cls: type[torch.optim.Optimizer]) -> None:
    if cls is torch.optim.Adagrad:
        pytest.skip("it makes its state when constructed; the parity tests cover it")
    optimizer = cls(parameters(), **({"momentum": 0.9} if cls is torch.optim.SGD else {}))
    # The same arithmetic; only vector lanes differ.
    assert max(differences(optimizer).values()) < 1e-6


class Own(torch.optim.Optimizer):
    """Base of a user's optimizers: a step by a function of the gradient."""

    def __init__(self, params: Any, lr: float | Tensor = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            for p, update in zip(moved, self.updates(moved), strict=True):
                p.sub_(update * group["lr"])
        return loss

    def updates(self, moved: list[nn.Parameter]) -> list[Tensor]:
        raise NotImplementedError


class Lion(Own):
    """Element-wise, with attributes beside its groups."""

    momentum, num_calls = 0.9, 0

    def updates(self, moved: list[nn.Parameter]) -> list[Tensor]:
        self.num_calls += 1
        for p in moved:
            average = self.state[p].setdefault("average", torch.zeros_like(p))
            average.mul_(self.momentum).add_(p.grad)
        return [self.state[p]["average"].sign() for p in moved]


class Lars(Own):
    """A trust ratio."""

    def updates(self, moved: list[nn.Parameter]) -> list[Tensor]:
        return [p.grad * p.norm() / p.grad.norm() for p in moved]


class FactoredFrom(Own):
    """Factors matrices from a size on, which is that of the smaller dim."""

    def updates(self, moved: list[nn.Parameter]) -> list[Tensor]:
        least = self.param_groups[0]["least"]
        return [p.grad / (p.grad.std() if min(p.shape) >= least else 1.0) for p in moved]


class RowNorms(Own):
    """Reads rows of matrices: their columns may not be divided."""

    def updates(self, moved: list[nn.Parameter]) -> list[Tensor]:
        return [p.grad / p.grad.norm(dim=-1, keepdim=True) if p.ndim > 1 else p.grad for p in moved]


class Projected(Own):
    """Reads rows only where gradients are orthogonal to them, as AdamP does."""

    def updates(self, moved: list[nn.Parameter]) -> list[Tensor]:
        cosines = [torch.cosine_similarity(p.grad, p.detach(), dim=-1).abs().max() for p in moved]
        return [
            2 * p.grad if p.ndim > 1 and cosine < 1e-4 else p.grad
            for p, cosine in zip(moved, cosines, strict=True)
        ]


class Normalized(Own):
    """The norm of a group, as of D-Adaptation's kind."""

    def updates(self, moved: list[nn.Parameter]) -> list[Tensor]:
        norm = torch.stack([p.grad.norm() for p in moved]).norm()
        return [p.grad / norm for p in moved]


class Clipped(Own):
    """Reads a group only where gradients are large."""

    def updates(self, moved: list[nn.Parameter]) -> list[Tensor]:
        norm = torch.stack([p.grad.norm() for p in moved]).norm()
        return [p.grad / (norm / 100).clamp(min=1.0) for p in moved]


class DAdapted(Own):
    """A step size that is estimated from all elements, from a tiny one on."""

    size = 1e-4

    def updates(self, moved: list[nn.Parameter]) -> list[Tensor]:
        sums = [self.state[p].setdefault("sum", torch.zeros_like(p)) for p in moved]
        for p, total in zip(moved, sums, strict=True):
            self.state[p].setdefault("start", p.detach().clone())
            total.add_(p.grad)
        along = sum(float((p.grad * (self.state[p]["start"] - p)).sum()) for p in moved)
        self.size = max(self.size, along / sum(float(total.abs().sum()) for total in sums))
        return [self.size * p.grad for p in moved]


class Noisy(Own):
    """Random numbers of a tensor, of its own kind each: torch's, NumPy's and Python's."""

    def updates(self, moved: list[nn.Parameter]) -> list[Tensor]:
        return [
            p.grad * torch.rand_like(p) + float(np.random.rand()) + random.random() for p in moved
        ]


class InBlocks(Own):
    """Rounds the gradient in blocks that share a scale, in large tensors only, as 8-bit optimizers
    do."""

    def updates(self, moved: list[nn.Parameter]) -> list[Tensor]:
        return [self._rounded(p.grad) if p.numel() >= 4096 else p.grad for p in moved]

    @staticmethod
    def _rounded(gradient: Tensor) -> Tensor:
        blocks = nn.functional.pad(gradient.flatten(), (0, -gradient.numel() % 256)).view(-1, 256)
        scale = blocks.abs().amax(dim=1, keepdim=True) / 127
        rounded = (blocks / scale).round() * scale
        return rounded.flatten()[: gradient.numel()].view_as(gradient)


ANYWHERE, WHOLE = (), ("flat", "rows", "columns")


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("cls", "options", "refused"),
    [
        (Lion, {}, ANYWHERE),
        (Lars, {}, WHOLE),
        (FactoredFrom, {"least": 16}, WHOLE),
        (FactoredFrom, {"least": 128}, WHOLE),
        (RowNorms, {}, ("flat", "columns")),
        (Projected, {}, ("flat", "columns")),
        (InBlocks, {}, WHOLE),
        (Normalized, {}, (*WHOLE, "tensors")),
        (Clipped, {}, (*WHOLE, "tensors")),
        (DAdapted, {}, (*WHOLE, "tensors")),
        (torch.optim.Adafactor, {}, WHOLE),
    ],
)
def test_a_trial_shows_what_a_step_reads(
    cls: Any, options: dict[str, Any], refused: tuple[str, ...]
) -> None:
    found = differences(cls(parameters(), lr=1e-3, **options))
    assert {name for name, difference in found.items() if difference > 1e-3} == set(refused), found
    assert all(found[name] < 1e-6 for name in DIVISIONS if name not in refused), found


def test_thresholds_are_reached_by_the_shapes_of_a_group() -> None:
    size = 2**20
    assert trial_shapes([(8, 6), (6,)], size) == [(128, 128), (128, 128), (128,)]
    assert trial_shapes([(300, 200), (8, 8)], size) == [(300, 200), (128, 128)]
    assert trial_shapes([(50_000, 64)], size)[0] == (4096, 128)
    assert trial_shapes([(8, 300, 200)], size)[0] == (8, 300, 200)  # stacked experts
    assert trial_shapes([(64, 32, 3, 3)], size)[0] == (128, 128, 3, 3)
    assert trial_shapes([(6,), ()], size) == [(128,), (128,)]
    assert trial_shapes([(5000,)], size) == [(5000,), (128,)]
    assert trial_shapes([(300, 200)], 1)[0] == (128, 128)
    found = differences(FactoredFrom(parameters((200, 200)), least=200))
    assert found["flat"] > 1e-2 and found["rows"] > 1e-2


def test_owners_step_what_the_layout_would_divide() -> None:
    assert whole(Lars(parameters()), sharded=True) == ["Lars"]
    assert whole(Lars(parameters()), tp=2) == ["Lars"]
    assert check(Lars(parameters()), pp=2) == ["Lars"]
    assert check(Lars(parameters()), num_ranks=2) == []  # ddp
    assert check(Lars(parameters((6,))), tp=2) == []  # no parameter of it is divided
    with pytest.raises(
        ConfigError, match=r"Normalized reads statistics .*pipeline_model_parallel_"
    ):
        check(Normalized(parameters()), pp=2)
    with pytest.raises(ConfigError, match=r'Normalized reads statistics .*data_parallel="ddp"'):
        check(Normalized(parameters()), sharded=True)


def test_what_a_trial_may_not_show_is_known_by_name_or_said() -> None:
    class AdamP(Lion):
        pass

    class Derived(AdamP):
        pass

    assert whole(Derived(parameters()), sharded=True) == ["Derived"]
    assert check(AdamP(parameters()), pp=2) == ["AdamP"]

    class SWATS(Lion):
        pass

    with pytest.raises(ConfigError, match="SWATS reads statistics"):
        check(SWATS(parameters()), pp=2)

    assert whole(Lion(parameters()), sharded=True, whole_tensors=True) == ["Lion"]
    assert check(torch.optim.AdamW(parameters()), sharded=True, whole_tensors=True) == []
    with pytest.raises(ConfigError, match="Normalized reads statistics"):
        check(Normalized(parameters()), sharded=True, whole_tensors=True)


def test_full_matrices_and_known_optimizers_are_not_tried() -> None:
    matrices, others = parameters((8, 8)), parameters((8, 6), (6,))
    chain = ChainedOptimizer(torch.optim.Muon(matrices), torch.optim.AdamW(others))
    assert check(chain, sharded=True, tp=2, pp=2, num_ranks=8) == []
    assert check(Lion([{"params": parameters()}, {"params": []}]), sharded=True) == ["Lion"]
    chain = ChainedOptimizer(torch.optim.AdamW(matrices), Lars(others))
    assert whole(chain, sharded=True) == ["Lars"]  # alone


def test_groups_of_frozen_parameters_are_left_out() -> None:
    frozen, head = parameters((8, 6)), parameters((8, 6), (6,))
    context = ParallelContext(ParallelLayout(), planned_world_size=2)
    for optimizer, found in ((Lion, []), (Lars, ["Lars"])):
        stepping = optimizer([{"params": frozen}, {"params": head}])
        group = id(stepping.param_groups[1])  # the reduction knows the trained parameters only
        stepped = [Stepped(group, ShardSpec.replicated(p.shape), True) for p in head]
        assert list(divide([(stepping, stepped)], context).whole) == found


def test_a_trial_of_groups_that_differ_in_rate_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[dict[str, Any]] = []

    def counting(optimizer: Any, group: Any, divisions: Any, **kwargs: Any) -> Any:
        tried.append(group)
        return probe(optimizer, group, divisions, **kwargs)

    monkeypatch.setattr("megatron_lightning.optim.stepping.elementwise.probe", counting)
    passed: set[Trial] = set()
    rates = [{"params": parameters(), "lr": 0.1**n, "name": f"layer{n}"} for n in range(5)]
    optimizer = Lion(rates, weight_decay=0.1, least=16)
    check(optimizer, sharded=True, passed=passed)
    once = len(tried)
    assert all(group is optimizer.param_groups[0] for group in tried)
    check(optimizer, sharded=True, passed=passed)
    assert len(tried) == once

    optimizer.param_groups[1]["weight_decay"] = 0.0  # may leave out a trust ratio
    optimizer.param_groups[2]["least"] = 128
    optimizer.add_param_group({"params": parameters((512, 6))})
    check(optimizer, sharded=True, passed=passed)
    assert [group for group in tried[once:] if group is optimizer.param_groups[0]] == []
    assert {id(group) for group in tried[once:]} == {
        id(optimizer.param_groups[n]) for n in (1, 2, 5)
    }


@pytest.mark.parametrize("rate", [0.0, 1e-6, 0.1, torch.tensor(0.1)])
def test_a_trial_leaves_no_trace(rate: Any) -> None:
    own = parameters()
    optimizer = Lion(own, lr=rate)
    optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook saw the trial"))
    # Wraps step, which must not count the trial.
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    state, numpy, python = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    assert check(optimizer, sharded=True) == ["Lion"]
    with pytest.raises(ConfigError, match="Noisy reads"):
        check(Noisy(own, lr=rate), sharded=True)
    assert whole(Lars(own, lr=rate), sharded=True) == ["Lars"]
    assert optimizer.num_calls == 0 and not optimizer.state
    assert all(torch.equal(p, torch.ones_like(p)) and p.grad is None for p in own)
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python
    assert (np.random.get_state()[1] == numpy).all()


class Around(torch.optim.Optimizer):
    """Lets another optimizer step, in groups that they share or that both have."""

    def __init__(self, inner: torch.optim.Optimizer, *, shares: bool) -> None:
        super().__init__([{"params": group["params"]} for group in inner.param_groups], {"lr": 0.1})
        self.inner = inner
        if shares:
            self.param_groups = inner.param_groups

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.inner.step()


class ByProperty(torch.optim.Optimizer):
    """A wrapper whose groups and state are those of the optimizer inside."""

    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.inner.state)  # type: ignore[assignment]

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)


def test_an_optimizer_inside_another_is_tried() -> None:
    adam = torch.optim.AdamW(parameters())
    assert check(Around(adam, shares=True), sharded=True) == ["Around"]
    assert check(ByProperty(adam), sharded=True) == ["ByProperty"]
    assert whole(ByProperty(Lars(parameters())), sharded=True) == ["ByProperty"]
    with pytest.raises(
        ConfigError, match=r'Around could not be tried .*did not move .*data_parallel="ddp"'
    ):
        check(Around(adam, shares=False), sharded=True)


class Swaps(Lion):
    """Steps only after ``train()``, as schedule-free optimizers do."""

    mode = "eval"

    def train(self) -> None:
        self.mode = "train"

    def updates(self, moved: list[nn.Parameter]) -> list[Tensor]:
        if self.mode != "train":
            raise RuntimeError("call train() first")
        return super().updates(moved)


class Sharpness(Own):
    """Evaluates the loss at other weights, as SAM does."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        assert closure is not None
        closure()
        return super().step(closure)

    def updates(self, moved: list[nn.Parameter]) -> list[Tensor]:
        return [p.grad for p in moved]


def test_modes_and_closures() -> None:
    swapping = Swaps(parameters())
    assert check(swapping, sharded=True) == ["Swaps"] and swapping.mode == "eval"
    with pytest.raises(
        ConfigError, match=r"Sharpness could not .*evaluates the loss several times"
    ):
        check(Sharpness(parameters()), tp=2)
    with pytest.raises(ConfigError, match="LBFGS could not be tried"):
        check(torch.optim.LBFGS(parameters()), pp=2)
