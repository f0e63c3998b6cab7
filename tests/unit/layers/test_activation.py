"""Activations: values by other formulas, and gradients by autograd."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.activation import build_activation
from tests.helpers.layouts import tiny_config

CONFIG = tiny_config(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=5)


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh((2.0 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


GATES: dict[str, Any] = {
    "swiglu": lambda x: x / (1.0 + (-x).exp()),
    "geglu": lambda x: x * 0.5 * (1.0 + torch.erf(x / 2.0**0.5)),
    "geglu_tanh": _gelu_tanh,
    "quick_geglu": lambda x: x / (1.0 + (-1.702 * x).exp()),
}


@pytest.mark.parametrize("options", [{}, {"glu_linear_offset": 0.5}, {
    "activation_func_clamp_value": 0.7, "glu_linear_offset": 1.0,
}], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", GATES)
def test_a_gated_unit_is_its_formula(name: str, options: dict[str, float]) -> None:
    unit = build_activation(replace(CONFIG, activation=name, **options))  # type: ignore[arg-type]
    x = torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    own, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    gate, up = other.chunk(2, -1)
    limit = options.get("activation_func_clamp_value", 1e9)
    gate, up = torch.minimum(gate, torch.tensor(limit)), up.clip(-limit, limit)
    expected = GATES[name](gate) * (up + options.get("glu_linear_offset", 0.0))
    found = unit(own)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(own.grad, other.grad)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        unit(own)
    assert [tensor.shape for tensor in kept] == [x.shape]  # the input alone


def test_squared_relu() -> None:
    x = torch.randn(9)
    unit = build_activation(replace(CONFIG, activation="squared_relu"))
    torch.testing.assert_close(unit(x), F.relu(x) ** 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_func_clamp_value": 0.0}, "clamp_value is 0.0, and values.*above 0"),
        ({"activation": "gelu", "glu_linear_offset": 1.0}, "options of gated.*activation is gelu"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **options)
