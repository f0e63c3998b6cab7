"""Losses of preferences: functions of the log-probabilities of chosen and rejected answers.

With w and l the log-probabilities of a chosen and a rejected answer, sums over the tokens of the
answer, w_ref and l_ref under a reference, n the numbers of tokens, s = log sigmoid:

    sigmoid   -s(b ((w - w_ref) - (l - l_ref)))                        DPO, arXiv 2305.18290
    ipo       ((w - w_ref) / n_w - (l - l_ref) / n_l - 1 / (2 b))^2    IPO, arXiv 2310.12036
    orpo      -w / n_w - b s(odds(w / n_w) - odds(l / n_l))            ORPO, arXiv 2403.07691
    simpo     -s(b (w / n_w - l / n_l) - g)                            SimPO, arXiv 2405.14734

where odds(x) = x - log(1 - exp x). All losses belong to a pair, so that micro-batches do not change
a loss. For the loss of KTO see :mod:`megatron_lightning.layers.losses.unpaired_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.errors import ConfigError

PreferenceLossName = Literal["sigmoid", "ipo", "orpo", "simpo"]


class AnswerScores(NamedTuple):
    """Log-probabilities of answers."""

    log_probs: Tensor
    """[b, 2] of the chosen and the rejected answer, in fp32."""
    num_tokens: Tensor
    """[b, 2] tokens of the answers."""

    @property
    def means(self) -> Tensor:
        """Log-probabilities per token [b, 2]."""
        return self.log_probs / self.num_tokens.clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """A loss of preferences."""

    name: PreferenceLossName = "sigmoid"
    """See the module."""
    beta: float = 0.1
    """Factor of the difference. For IPO the weight of the regularization, for ORPO the weight of
    the odds ratio."""
    gamma: float = 0.5
    """Margin of SimPO."""
    label_smoothing: float = 0.0
    """Probability of a swapped pair, for "sigmoid" (conservative DPO)."""

    def __post_init__(self) -> None:
        if self.name not in _LOSSES:
            names = ", ".join(_LOSSES)
            if str(self.name) == "kto":
                raise ConfigError(
                    "name is 'kto', whose loss is one of single answers: see UnpairedLoss. Set one "
                    f"of {names}."
                )
            raise ConfigError(f"loss is {self.name!r}; must be one of {names}.")
        if self.beta <= 0.0:
            raise ConfigError(f"beta is {self.beta}; must be positive.")
        if not 0.0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"label_smoothing is {self.label_smoothing}; set it to 0 or more, and below 0.5."
            )
        if self.label_smoothing and self.name != "sigmoid":
            raise ConfigError(
                f"label_smoothing is {self.label_smoothing}, and is for the loss sigmoid alone, "
                f"not for {self.name}. Leave it out."
            )

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.name in ("sigmoid", "ipo")

    def __call__(self, policy: AnswerScores, reference: Tensor | None = None) -> Tensor:
        """Return the loss of every pair [b] in fp32.

        Args:
            policy: Of the trained model.
            reference: Log-probabilities under the reference [b, 2], for sigmoid and ipo.
        """
        ratios = policy.log_probs if reference is None else policy.log_probs - reference
        return _LOSSES[self.name](self, policy, ratios)


def _sigmoid(loss: PreferenceLoss, _: AnswerScores, ratios: Tensor) -> Tensor:
    logits = loss.beta * (ratios[:, 0] - ratios[:, 1])
    right = -F.logsigmoid(logits)
    if not loss.label_smoothing:
        return right
    return (1 - loss.label_smoothing) * right - loss.label_smoothing * F.logsigmoid(-logits)


def _ipo(loss: PreferenceLoss, policy: AnswerScores, ratios: Tensor) -> Tensor:
    means = ratios / policy.num_tokens.clamp(min=1)
    return (means[:, 0] - means[:, 1] - 1 / (2 * loss.beta)).square()


def _orpo(loss: PreferenceLoss, policy: AnswerScores, _: Tensor) -> Tensor:
    means = policy.means
    odds = means - _log1mexp(means)
    return -means[:, 0] - loss.beta * F.logsigmoid(odds[:, 0] - odds[:, 1])


def _simpo(loss: PreferenceLoss, policy: AnswerScores, _: Tensor) -> Tensor:
    means = policy.means
    return -F.logsigmoid(loss.beta * (means[:, 0] - means[:, 1]) - loss.gamma)


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp x) of x < 0, by the form that is exact for the range of x (Maechler,
    "Accurately computing log(1 - exp(-|a|))").
    """
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    is_small = x > -0.6931472
    near = torch.log(-torch.expm1(torch.where(is_small, x, -1.0)))
    return torch.where(is_small, near, torch.log1p(-torch.exp(torch.where(is_small, -1.0, x))))


_LOSSES: Mapping[str, Callable[[PreferenceLoss, AnswerScores, Tensor], Tensor]] = MappingProxyType(
    {"sigmoid": _sigmoid, "ipo": _ipo, "orpo": _orpo, "simpo": _simpo}
)
