"""Losses of policies: functions of the log-probabilities of sampled tokens.

With p, o and r the log-probabilities of a token now, before the update and under a reference, A the
advantage of the row, m the mask of sampled tokens, n = sum_t m_t, w = exp(p - o) (of a token, or of
a row: exp(sum_t m (p - o) / n), GSPO, arXiv 2507.18071), sg a constant in backward:

    grpo dr_grpo dapo luspo   -min(min(w, delta) A, clamp(w, 1 - epsilon, 1 + epsilon_high) A)
    cispo   -sg(min(w, epsilon_high)) A p                           MiniMax-M1, arXiv 2506.13585
    sapo    -sigmoid(t (w - 1)) 4 / t A                             arXiv 2511.20347
    vespo   -sg(W^k exp(l - l W)) A p, W = exp(sum_t m (p - o))     arXiv 2602.10693

Each is multiplied by the masks and the correction of another sampler, and beta times the divergence
exp(r - p) - (r - p) - 1 is added. The loss of a step is a sum over all tokens by one weight:

    grpo sapo               tokens of a row count 1 / n             by rows     arXiv 2402.03300
    dr_grpo                 tokens count 1 / max_completion_length  by rows     arXiv 2503.20783
    luspo                   tokens count 1                          by rows     arXiv 2602.05261
    dapo cispo vespo        tokens count 1                          by tokens   arXiv 2503.14476

So sums and weights are all that micro-batches and ranks exchange. Names and defaults are those of
TRL. Legend: b rows, s tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError

PolicyLossName = Literal["grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
Level = Literal["token", "sequence"]
BY_TOKENS = ("dapo", "cispo", "vespo")
"""Losses whose weight is the number of tokens. The others are means over rows."""

_BOUND = 20.0  # of logarithms of ratios, as in TRL
_LEAST = math.log(1e-8)


class RowParts:
    """Rows, as far as this rank holds them: here all tokens.

    A subclass for ranks that share rows reduces over the ranks.
    """

    share: float = 1.0
    """Part of a row that this rank counts in sums over rows."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sums [b, 1] of ``values`` [b, s] over all tokens of the rows."""
        return values.sum(-1, keepdim=True)


WHOLE_ROWS = RowParts()


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A loss of a policy.

    Args:
        loss_type: See the module.
        importance_sampling_level: Whether a ratio belongs to a token or to a row.
        epsilon: Distance of a ratio from 1 downwards beyond which it has no gradient.
        epsilon_high: The same upwards. None: ``epsilon``. For cispo the largest ratio
            itself, such as 5.
        delta: Largest ratio where the loss is not clipped. None: no limit.
        beta: Factor of the divergence from the reference. 0: there is no reference.
        use_bias_correction_kl: Whether the divergence is multiplied by the ratio.
        max_completion_length: Divisor of dr_grpo.
        sapo_temperature_pos: Temperature of sapo for positive advantages.
        sapo_temperature_neg: Temperature of sapo for other advantages.
        vespo_k_pos: Power of vespo for advantages that are not negative.
        vespo_lambda_pos: Decay of vespo for advantages that are not negative.
        vespo_k_neg: Power of vespo for negative advantages.
        vespo_lambda_neg: Decay of vespo for negative advantages.
        off_policy_mask_threshold: Mean difference from the sampler's log-probabilities
            beyond which rows with negative advantages are left out. None: no limit.
        importance_sampling_correction: How the ratio of the old log-probabilities to the
            sampler's weighs tokens or rows: cut to the limits ("truncate"), or 0 outside of
            them ("mask"). None: no correction.
        importance_sampling_clip_max: Upper limit of the correction. None: none.
        importance_sampling_clip_min: Lower limit of the correction. None: none.

    Raises:
        ConfigError: If a value, or the combination, cannot work.
    """

    loss_type: PolicyLossName = "dapo"
    importance_sampling_level: Level = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    max_completion_length: int = 512
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    off_policy_mask_threshold: float | None = None
    importance_sampling_correction: Correction | None = None
    importance_sampling_clip_max: float | None = 3.0
    importance_sampling_clip_min: float | None = None

    def __post_init__(self) -> None:
        _check_name("loss_type", self.loss_type, PolicyLossName)
        _check_name("importance_sampling_level", self.importance_sampling_level, Level)
        if self.importance_sampling_correction is not None:
            _check_name(
                "importance_sampling_correction", self.importance_sampling_correction, Correction
            )
        for name in ("epsilon", "beta"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; must not be negative.")
        if self.max_completion_length < 1:
            raise ConfigError(
                f"max_completion_length is {self.max_completion_length}; must be positive."
            )
        if self.loss_type == "cispo" and self.epsilon_high is None:
            raise ConfigError(
                "loss_type is cispo, whose epsilon_high is the largest ratio itself, and "
                "epsilon_high is not set: epsilon in its place would cut every ratio to "
                f"{self.epsilon}. Set epsilon_high to 5.0, or another number above 1."
            )
        mode = self.importance_sampling_correction
        if self.loss_type == "vespo" and mode is not None and mode.startswith("sequence"):
            raise ConfigError(
                f"importance_sampling_correction is {mode}, and vespo multiplies the ratios of a "
                "row's tokens itself. Set it to token_truncate or token_mask."
            )

    @property
    def by_tokens(self) -> bool:
        """Whether the loss is a mean over tokens. False: over rows."""
        return self.loss_type in BY_TOKENS

    @property
    def largest_ratio(self) -> float:
        """Ratio beyond which a positive advantage has no gradient."""
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return high if self.loss_type == "cispo" else 1 + high

    @property
    def needs_sampler(self) -> bool:
        """Whether the loss reads the log-probabilities of the sampler."""
        correction = self.importance_sampling_correction
        return correction is not None or self.off_policy_mask_threshold is not None

    def weight(self, mask: Tensor, parts: RowParts = WHOLE_ROWS) -> Tensor:
        """Return the weight [] in fp32 of rows in the loss of a step: tokens, or rows. Rows without
        a token count, too.

        Args:
            mask: Whether a token was sampled [b, s].
            parts: Of the rows on this rank.
        """
        if self.by_tokens:
            return mask.sum(dtype=torch.float32)
        return torch.tensor(len(mask) * parts.share, device=mask.device)

    def __call__(
        self, logprobs: Tensor, batch: Mapping[str, Tensor], parts: RowParts = WHOLE_ROWS
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses [], and their weight [] (:meth:`weight`).

        Args:
            logprobs: Log-probabilities of the tokens [b, s] now.
            batch: ``mask`` [b, s] of the sampled tokens and ``advantages`` [b] or [b, s].
                ``old_logprobs`` [b, s] before the update (default: now), ``ref_logprobs`` [b, s] of
                the reference, ``logprobs`` [b, s] of the sampler (NaN: unknown), and ``trains``
                [b, s], false for tokens that count in the weight alone.
            parts: Of the rows on this rank.
        """
        terms = self.terms(logprobs, batch, parts)
        losses = _LOSSES[self.loss_type](self, terms)
        threshold = self.off_policy_mask_threshold
        if threshold is not None:
            losses = losses * _is_near(terms, batch, threshold)
        if "trains" in batch:
            losses = losses * batch["trains"]
        if terms.correction is not None and self.loss_type != "vespo":
            losses = losses * terms.correction
        if self.beta:
            losses = losses + self.beta * self.divergence(terms, batch["ref_logprobs"])
        losses = losses.expand_as(terms.mask) * terms.mask
        if self.loss_type in ("grpo", "sapo"):
            losses = losses / terms.counts
        elif self.loss_type == "dr_grpo":
            losses = losses / self.max_completion_length
        return losses.sum(), self.weight(batch["mask"], parts)

    def terms(self, logprobs: Tensor, batch: Mapping[str, Tensor], parts: RowParts) -> Terms:
        """Return what all losses have in common. The arguments are those of a call."""
        mask = batch["mask"].to(logprobs.dtype)
        old = batch.get("old_logprobs", logprobs.detach())
        # Places without a sampled token may hold any number.
        log_ratio = (logprobs - old).masked_fill(mask == 0, 0.0)
        counts = parts.sum(mask).clamp(min=1.0)
        level = log_ratio
        if self.importance_sampling_level == "sequence":
            level = parts.sum(log_ratio) / counts
        advantages = batch["advantages"].to(logprobs.dtype)
        return Terms(
            logprobs=logprobs.masked_fill(mask == 0, 0.0),
            ratio=level.exp(),
            log_ratio=log_ratio,
            advantages=advantages if advantages.ndim > 1 else advantages[:, None],
            mask=mask,
            counts=counts,
            correction=self._correction(old, batch, mask, parts),
            parts=parts,
        )

    def divergence(self, terms: Terms, reference: Tensor) -> Tensor:
        """Return the divergence [b, s] of the tokens from the reference."""
        difference = (reference - terms.logprobs).masked_fill(terms.mask == 0, 0.0)
        divergence = difference.exp() - difference - 1
        return divergence * terms.ratio if self.use_bias_correction_kl else divergence

    def _correction(
        self, old: Tensor, batch: Mapping[str, Tensor], mask: Tensor, parts: RowParts
    ) -> Tensor | None:
        """Return the weights of tokens [b, s], or of rows [b, 1], from another sampler."""
        mode = self.importance_sampling_correction
        if mode is None:
            return None
        difference = ((old - batch["logprobs"]) * mask).nan_to_num(0.0)
        if mode.startswith("sequence"):
            difference = parts.sum(difference)
        ratio = difference.exp()
        low, high = self.importance_sampling_clip_min, self.importance_sampling_clip_max
        if mode.endswith("truncate"):
            return ratio if low is None and high is None else ratio.clamp(low, high)
        is_outside = (ratio < (-math.inf if low is None else low)) | (
            ratio > (math.inf if high is None else high)
        )
        return ratio.masked_fill(is_outside, 0.0)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Numbers that all losses have in common."""

    logprobs: Tensor
    """[b, s], 0 outside of the mask."""
    ratio: Tensor
    """w [b, s], or [b, 1]."""
    log_ratio: Tensor
    """[b, s]."""
    advantages: Tensor
    """[b, 1] or [b, s]."""
    mask: Tensor
    """[b, s]."""
    counts: Tensor
    """Sampled tokens of the rows, 1 at least [b, 1]."""
    correction: Tensor | None
    """Of another sampler [b, s] or [b, 1]."""
    parts: RowParts


def _is_near(terms: Terms, batch: Mapping[str, Tensor], threshold: float) -> Tensor:
    """Return which rows count [b, 1] or, with advantages of tokens, which tokens [b, s]."""
    sampled = batch.get("logprobs", batch.get("old_logprobs", terms.logprobs.detach()))
    difference = (sampled - terms.logprobs.detach()) * terms.mask
    mean = terms.parts.sum(difference.nan_to_num(0.0)) / terms.counts
    return (terms.advantages >= 0) | (mean <= threshold)


def _clipped(loss: PolicyLoss, terms: Terms) -> Tensor:
    clipped = terms.ratio.clamp(1 - loss.epsilon, loss.largest_ratio)
    ratio = terms.ratio if loss.delta is None else terms.ratio.clamp(max=loss.delta)
    return -torch.min(ratio * terms.advantages, clipped * terms.advantages)


def _cispo(loss: PolicyLoss, terms: Terms) -> Tensor:
    weight = terms.ratio.clamp(max=loss.largest_ratio).detach()
    return -weight * terms.advantages * terms.logprobs


def _sapo(loss: PolicyLoss, terms: Terms) -> Tensor:
    is_positive = terms.advantages > 0
    t = torch.where(is_positive, loss.sapo_temperature_pos, loss.sapo_temperature_neg)
    return -torch.sigmoid(t * (terms.ratio - 1)) * 4 / t * terms.advantages


def _vespo(loss: PolicyLoss, terms: Terms) -> Tensor:
    log_ratio = terms.log_ratio.detach().clamp(-_BOUND, _BOUND)
    log_weight = terms.parts.sum(log_ratio)
    if terms.correction is not None:
        log_weight = log_weight + terms.parts.sum(terms.correction.log().clamp(_LEAST, _BOUND))
    log_weight = log_weight.clamp(_LEAST, _BOUND)
    is_positive = terms.advantages >= 0
    k = torch.where(is_positive, loss.vespo_k_pos, loss.vespo_k_neg)
    decay = torch.where(is_positive, loss.vespo_lambda_pos, loss.vespo_lambda_neg).clamp(min=1e-4)
    weight = (decay + k * log_weight - decay * log_weight.exp()).exp().nan_to_num(0.0, 0.0, 0.0)
    return -weight * terms.advantages * terms.logprobs


_LOSSES: Mapping[str, Callable[[PolicyLoss, Terms], Tensor]] = MappingProxyType(
    {
        "grpo": _clipped,
        "dr_grpo": _clipped,
        "dapo": _clipped,
        "luspo": _clipped,
        "cispo": _cispo,
        "sapo": _sapo,
        "vespo": _vespo,
    }
)


def _check_name(option: str, value: str, names: object) -> None:
    known = get_args(names)
    if value in known:
        return
    if value == "bnpo":
        raise ConfigError(
            f"{option} is bnpo, whose divisor is the tokens of a micro-batch, so that every split "
            "into micro-batches and ranks would change it. Set it to dapo, which divides by the "
            "tokens of the step."
        )
    raise ConfigError(f"{option} is {value!r}; must be one of {', '.join(known)}.")
