"""Moments kept as bf16 between the steps.

The optimizer computes in fp32: its moments are widened before a step and rounded to the nearest bf16 after it, so that the
4 bytes a parameter are saved while forward and backward need the memory, not during the step itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})
"""States that are averages of gradients; what other optimizers sum up for ever would not survive the rounding."""

_SMALLEST_UPDATE = 2.0**-9  # half the distance of neighbouring bf16 numbers, relative to the larger ones


def warn_if_lost(optimizer: Optimizer) -> None:
    """Warn if the second moment changes by less in a step than bf16 can tell apart."""
    slow = {group["betas"][1] for group in optimizer.param_groups if "betas" in group}
    slow = {beta for beta in slow if 1.0 - float(beta) < _SMALLEST_UPDATE}
    if slow:
        warnings.warn(
            f"moments_dtype='bf16' with beta2={max(slow)}: a second moment that shrinks by {1.0 - max(slow):.2g} of itself a "
            "step rounds back to what it was, so it never falls. Set beta2 to 0.99 or less, or moments_dtype='fp32'.",
            stacklevel=2,
        )


def widen(optimizer: Optimizer, targets: Iterable[nn.Parameter]) -> None:
    """Give the moments of ``targets`` the targets' own dtype."""
    for target in targets:
        _cast(optimizer, target, target.dtype)


def narrow(optimizer: Optimizer, targets: Iterable[nn.Parameter]) -> None:
    """Round the moments of ``targets`` to bf16."""
    for target in targets:
        _cast(optimizer, target, torch.bfloat16)


def _cast(optimizer: Optimizer, target: nn.Parameter, dtype: torch.dtype) -> None:
    state = optimizer.state.get(target, {})
    for key in MOMENTS.intersection(state):
        value = state[key]
        if isinstance(value, Tensor):  # None: momentum that is switched off
            state[key] = value.to(dtype)
