"""Which optimizers may step flat pieces of a matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.elementwise import ELEMENTWISE, probe, require_elementwise


@pytest.mark.parametrize("cls", sorted(ELEMENTWISE, key=lambda cls: cls.__name__))
def test_the_listed_optimizers_are_elementwise(cls: type[torch.optim.Optimizer]) -> None:
    options: dict[str, Any] = {"lr": 1e-3} if cls is torch.optim.SGD else {}
    if cls is torch.optim.Adagrad:
        pytest.skip("it makes its state when constructed; the parity tests cover it")
    optimizer = cls([nn.Parameter(torch.ones(3))], **options)
    whole, pieces = probe(optimizer, optimizer.param_groups[0])
    assert whole.abs().max() > 0
    # The same arithmetic; only vector lanes differ.
    torch.testing.assert_close(whole, pieces, rtol=1e-6, atol=1e-7)


class Lion(torch.optim.Optimizer):
    """A user's element-wise optimizer, with an attribute that is not in its groups."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.momentum, self.num_calls = 0.9, 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.num_calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    average.mul_(self.momentum).add_(p.grad)
                    p.add_(average.sign(), alpha=-group["lr"])


class Lars(torch.optim.SGD):
    """A user's optimizer with a trust ratio: it sees the whole parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad * p.norm() / p.grad.norm(), alpha=-group["lr"])


class Around(torch.optim.Optimizer):
    """A user's optimizer that lets another one step, in groups that they share or that both
    have."""

    def __init__(self, inner: torch.optim.Optimizer, *, shares: bool) -> None:
        super().__init__([{"params": group["params"]} for group in inner.param_groups], {"lr": 0.1})
        self.inner = inner
        if shares:
            self.param_groups = inner.param_groups

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.inner.step()


def test_what_steps_something_else_than_its_groups_is_refused() -> None:
    def made(*, shares: bool) -> Around:
        return Around(torch.optim.AdamW([nn.Parameter(torch.ones(3))]), shares=shares)

    require_elementwise(made(shares=True))
    with pytest.raises(
        ConfigError,
        match=r'Around did not move a small matrix .* steps something else.*data_parallel="ddp"',
    ):
        require_elementwise(made(shares=False))


@pytest.mark.parametrize("rate", [0.0, 1e-6, 0.1])
def test_an_unknown_optimizer_is_tried(rate: float) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = Lion([parameter], lr=rate)
    # Wraps step, which must not count the trial.
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    generator = torch.get_rng_state()
    require_elementwise(optimizer)
    assert (
        optimizer.num_calls == 0 and not optimizer.state and torch.equal(parameter, torch.ones(3))
    )
    assert torch.equal(torch.get_rng_state(), generator)
    with pytest.raises(
        ConfigError,
        match=r'Lars does not treat every element.* differs by .*Set data_parallel="ddp"',
    ):
        require_elementwise(Lars([parameter], lr=rate))


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, torch.optim.Muon])
def test_matrix_optimizers_are_refused(cls: type[torch.optim.Optimizer]) -> None:
    with pytest.raises(ConfigError, match=rf'{cls.__name__} .*data_parallel="ddp"'):
        require_elementwise(cls([nn.Parameter(torch.ones(4, 4))]))


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LBFGS could not be tried .*closure"):
        require_elementwise(torch.optim.LBFGS([nn.Parameter(torch.ones(4))]))
