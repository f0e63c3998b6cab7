"""Stand-ins of gradients: torch's functions on ``p.grad`` are seen and computed, and the gradients
come back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from megatron_lightning.optim.gradients.gradient_proxies import StandIn, StandIns, gradient_of


def _shown() -> tuple[nn.Linear, list[Tensor], StandIns, list[Any]]:
    torch.manual_seed(0)
    layer, used = nn.Linear(3, 2), list[Any]()
    layer(torch.randn(4, 3)).square().sum().backward()
    gradients = [parameter.grad for parameter in layer.parameters()]
    stand_ins = StandIns(lambda _, func: used.append(func))
    stand_ins.show(layer.parameters())
    return layer, [g for g in gradients if g is not None], stand_ins, used


@pytest.mark.parametrize(
    "norm",
    [
        lambda layer: get_total_norm([p.grad for p in layer.parameters()]),
        lambda layer: grad_norm(layer, 2)["grad_2.0_norm_total"],
        lambda layer: clip_grad_norm_(layer.parameters(), 0.1),
        lambda layer: sum(p.grad.data.flatten().norm() ** 2 for p in layer.parameters()) ** 0.5,
        lambda layer: sum((p.grad**2).sum() for p in layer.parameters()) ** 0.5,
    ],
)
def test_functions_are_seen_and_compute_with_the_gradients(norm: Callable[[Any], Any]) -> None:
    layer, gradients, stand_ins, used = _shown()
    expected = get_total_norm([gradient.clone() for gradient in gradients])
    assert not used and torch.allclose(torch.as_tensor(norm(layer)), expected)
    assert used and type(norm(layer)) is not StandIn
    assert [gradient_of(p) for p in layer.parameters()] == gradients
    assert not stand_ins.remove()
    assert all(p.grad is g for p, g in zip(layer.parameters(), gradients, strict=True))


def test_changes_in_place_reach_gradient_and_version() -> None:
    layer, gradients, stand_ins, _ = _shown()
    before = [(gradient.clone(), gradient._version) for gradient in gradients]
    for parameter in layer.parameters():
        assert parameter.grad is not None
        parameter.grad *= 2
    assert not stand_ins.remove()
    for parameter, (value, version) in zip(layer.parameters(), before, strict=True):
        assert parameter.grad is not None and type(parameter.grad) is Tensor
        assert torch.equal(parameter.grad, 2 * value) and parameter.grad._version > version


def test_a_missing_gradient_is_none_again_unless_cleared() -> None:
    layer, used = nn.Linear(3, 2), list[Any]()
    stand_ins = StandIns(lambda stand_in, _: used.append(stand_in.gradient))
    stand_ins.replace_missing(layer.parameters())
    assert layer.weight.grad is not None and layer.weight.grad.shape == (2, 3) and not used
    assert gradient_of(layer.weight) is None
    assert layer.weight.grad.sum() == 0 and used == [None]
    assert not stand_ins.remove() and layer.weight.grad is None
    stand_ins.replace_missing(layer.parameters())
    layer.weight.grad = None
    assert stand_ins.remove() and layer.bias.grad is None


def test_a_backward_pass_gives_a_gradient_in_the_place_of_a_stand_in() -> None:
    layer = nn.Linear(3, 2)
    stand_ins = StandIns(lambda *_: None)
    stand_ins.replace_missing(layer.parameters())
    for _ in range(2):  # autograd cannot add to a tensor without memory
        layer(torch.ones(4, 3)).sum().backward()
    assert not stand_ins.remove()
    assert type(layer.weight.grad) is Tensor and torch.equal(
        layer.weight.grad, torch.full((2, 3), 8.0)
    )
