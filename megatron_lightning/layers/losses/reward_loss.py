"""The loss of reward models (Bradley-Terry): chosen answers score higher than rejected ones.

With w and l the scores of a chosen and a rejected answer, m a margin, and c the coefficient of
centering (arXiv 2312.09244):

    -log sigmoid(w - l - m) + c (w + l)^2

Both terms belong to a pair, so that micro-batches do not change the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RewardLoss:
    """The loss of pairs by their scores."""

    center_rewards_coefficient: float | None = None
    """Weight of the squared sum of both scores, which keeps rewards around 0. None: no centering.
    """

    def __post_init__(self) -> None:
        value = self.center_rewards_coefficient
        if value is not None and not 0.0 <= value < float("inf"):
            raise ConfigError(
                f"center_rewards_coefficient is {value}; set it to 0 or more, such as 0.01."
            )

    def __call__(self, scores: Tensor, margin: Tensor | None = None) -> Tensor:
        """Return the loss of every pair [b].

        Args:
            scores: Of the chosen and the rejected answer [b, 2], in fp32.
            margin: Least difference wanted of each pair [b]. None: 0.
        """
        difference = scores[:, 0] - scores[:, 1]
        loss = -F.logsigmoid(difference if margin is None else difference - margin)
        if self.center_rewards_coefficient is None:
            return loss
        return loss + self.center_rewards_coefficient * scores.sum(1).square()
