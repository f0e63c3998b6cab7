"""Terms and gradients of a chunk of logits, each as one kernel by torch's compiler.

Uncompiled, :class:`~megatron_lightning.layers.losses.loss.Vocabulary` reads and writes the logits
in fp32 several times. A kernel of the compiler reads the logits once, and writes a gradient in
their dtype. With a large vocabulary the difference is a tenth of a GPU's step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from megatron_lightning.compat import compiled
from megatron_lightning.layers.losses.loss import Factors, scaled, slope_of


def loss_terms(
    logits: Tensor, ids: Tensor, smoothed: bool, softcap: float | None, temperature: float = 1.0
) -> Tensor:
    """Return the terms of the loss [k, n], like
    :meth:`~megatron_lightning.layers.losses.loss.Vocabulary.terms`.

    Args:
        logits: [n, r].
        ids: Targets among the rank's rows [n].
        smoothed: Whether the sum of all logits is a term.
        softcap: Cap of the logits. None: no cap.
        temperature: Divisor of the logits.
    """
    x = _scaled(logits, softcap, temperature)
    maximum = x.amax(-1)
    log_sum = (x - maximum[:, None]).exp().sum(-1).log()
    # Subtract maxima first: the sum of a large maximum and a small logarithm is rounded.
    targets = logits.gather(-1, ids[:, None]).squeeze(-1)
    picked = _scaled(targets, softcap, temperature) - maximum - log_sum
    terms = [maximum + log_sum, picked]
    if smoothed:
        terms.append((x - maximum[:, None] - log_sum[:, None]).sum(-1))
    return torch.stack(terms)


def loss_gradient(  # noqa: PLR0917 (as a kernel is called)
    logits: Tensor,
    ids: Tensor,
    total: Tensor,
    factors: Factors,
    softcap: float | None,
    temperature: float = 1.0,
) -> Tensor:
    """Return the gradient of the logits [n, r], in their dtype.

    Args:
        logits: [n, r].
        ids: Targets among the rank's rows [n].
        total: Log-sum-exp of the rank's logits [n].
        factors: Of the gradient.
        softcap: Cap of the logits. None: no cap.
        temperature: Divisor of the logits.
    """
    x = _scaled(logits, softcap, temperature)
    columns = torch.arange(logits.shape[-1], device=logits.device)
    grad = (x - total[:, None]).exp() * factors.softmax[:, None]
    grad = grad + torch.where(columns == ids[:, None], factors.target[:, None], 0.0)
    if factors.every is not None:
        grad = grad - factors.every[:, None]
    slope = slope_of(x, softcap, temperature)
    if slope is not None:
        grad = grad * slope
    return grad.to(logits.dtype)


def _scaled(x: Tensor, softcap: float | None, temperature: float) -> Tensor:
    return scaled(x.to(torch.promote_types(x.dtype, torch.float32)), softcap, temperature)


@cache
def kernel(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the compiled function. The compiler starts at the first call."""
    return compiled(function)
