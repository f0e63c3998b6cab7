"""Initial values of state-space layers, as Mamba-2's authors choose them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

STEPS = (1e-3, 1e-1)
"""Smallest and largest initial step size."""
RATES = (1.0, 16.0)
"""Smallest and largest initial decay rate."""
_LEAST_STEP = 1e-4
_DELTA_BIAS = "self_attention.dt_bias"
_VECTORS = ("A_log", "D", "dt_bias")
_CONVOLUTION = "conv1d"
_BIAS_KERNEL = 4
"""Tokens of a convolution's kernel, for the bias, whose shape does not tell."""


def is_state_space(name: str) -> bool:
    """Return whether :func:`fill_initial` knows the parameter ``name``."""
    *module, last = name.split(".")
    return last in _VECTORS or module[-1:] == [_CONVOLUTION]


@torch.no_grad()
def fill_initial(name: str, tensor: Tensor, generator: torch.Generator | None = None) -> None:
    """Fill a parameter of a state-space layer with initial values.

    Step sizes are log-uniform in 1e-3 to 0.1, decay rates uniform in 1 to 16, D is one. A
    convolution is filled like ``nn.Conv1d``. The dt_bias of gated delta net is one.

    Args:
        name: Name of the parameter. The last segment is A_log, D or dt_bias, or the segment before
            is conv1d.
        tensor: The parameter, of the full shape.
        generator: Source of random numbers. None: torch's default generator.
    """
    if tensor.is_meta:
        return
    # Equal draws for all dtypes.
    values = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
    last = name.rpartition(".")[2]
    if last == "D" or name.endswith(_DELTA_BIAS):
        values.fill_(1.0)
    elif last == "A_log":
        values.uniform_(*RATES, generator=generator).log_()
    elif last == "dt_bias":
        low, high = map(math.log, STEPS)
        values.uniform_(low, high, generator=generator).exp_().clamp_(min=_LEAST_STEP)
        values += (-torch.expm1(-values)).log_()  # inverse of softplus
    else:
        bound = (tensor.shape[-1] if tensor.dim() == 3 else _BIAS_KERNEL) ** -0.5
        values.uniform_(-bound, bound, generator=generator)
    tensor.copy_(values)
