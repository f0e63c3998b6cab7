"""Moments stored as bf16 between steps.

The optimizer computes in fp32: moments are widened before a step and rounded to the nearest bf16
after the step. The 4 bytes per parameter are saved during forward and backward, not during the
step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MOMENTS = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "acc_delta",
    }
)
"""States with averages of gradients. Unbounded sums of other optimizers would not survive the
rounding."""

# Option -> name in messages.
_DECAY_RATES: Mapping[str, str] = {"betas": "beta2", "alpha": "alpha", "rho": "rho"}
# Half the distance of neighboring bf16 numbers, relative to the larger number.
_SMALLEST_UPDATE = 2.0**-9


def warn_if_lost(optimizer: Optimizer) -> None:
    """Warn if the second moment changes by less in a step than bf16 can represent."""
    rates = {
        name: [_rate(group, name) for group in optimizer.param_groups if name in group]
        for name in _DECAY_RATES
    }
    slow = {
        name: max(found)
        for name, found in rates.items()
        if found and 1.0 - max(found) < _SMALLEST_UPDATE
    }
    for name, rate in slow.items():
        called = _DECAY_RATES[name]
        warnings.warn(
            f"moments_dtype='bf16' with {called}={rate}: a second moment that shrinks by "
            f"{1.0 - rate:.2g} of itself a step rounds back to what it was, so it never falls. "
            f"Set {called} to 0.99 or less, or moments_dtype='fp32'.",
            stacklevel=2,
        )


def _rate(group: Mapping[str, Any], name: str) -> float:
    return float(group[name][1] if name == "betas" else group[name])


def widen(optimizer: Optimizer, targets: Iterable[nn.Parameter]) -> None:
    """Cast the moments of ``targets`` to the targets' dtype."""
    for target in targets:
        _cast(optimizer, target, target.dtype)


def narrow(optimizer: Optimizer, targets: Iterable[nn.Parameter]) -> None:
    """Round the moments of ``targets`` to bf16."""
    for target in targets:
        _cast(optimizer, target, torch.bfloat16)


def _cast(optimizer: Optimizer, target: nn.Parameter, dtype: torch.dtype) -> None:
    state = optimizer.state.get(target, {})
    # A variance is the difference of two moments. Rounded moments could make the variance negative.
    if "grad_avg" in state:
        return
    for key in MOMENTS.intersection(state):
        value = state[key]
        if isinstance(value, Tensor):  # None: momentum is switched off
            state[key] = value.to(dtype)
