"""Loss of single answers that are desirable or not (KTO, arXiv 2402.01306).

With d the log-probability of an answer, a sum over its tokens, less that under a reference, and K
the mean of d over answers behind the prompts of others, 0 at least and without gradient:

    desirable      a (1 - sigmoid(b (d - K)))
    undesirable    u (1 - sigmoid(b (K - d)))

K belongs to the whole step: a micro-batch of its own would change the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class UnpairedLoss:
    """The loss of KTO.

    Args:
        beta: Factor of the difference (b).
        desirable_weight: Factor of desirable answers (a).
        undesirable_weight: Factor of the others (u).

    Raises:
        ConfigError: If a value cannot work.
    """

    name: ClassVar[str] = "kto"
    needs_reference: ClassVar[bool] = True
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            if getattr(self, name) <= 0.0:
                raise ConfigError(f"{name} is {getattr(self, name)}; must be positive.")

    def __call__(self, difference: Tensor, desirable: Tensor, divergence: Tensor) -> Tensor:
        """Return the loss of every answer [b].

        Args:
            difference: Log-probabilities less those of the reference [b].
            desirable: Whether an answer is desirable [b].
            divergence: K [] or [b].
        """
        weights = difference.new_tensor([self.undesirable_weight, self.desirable_weight])
        factor, sign = weights[desirable.long()], 2.0 * desirable - 1.0
        return factor * (1 - torch.sigmoid(self.beta * (difference - divergence) * sign))
