"""Balancing losses and z-loss of a router.

Shapes: ``s`` sequence, ``b`` batch, ``t`` tokens (s b), ``E`` experts, ``k`` experts of a token.

The balancing loss is E sum_e f_e P_e with f_e the fraction of choices for expert e and P_e the mean
score of e (Switch Transformer, https://arxiv.org/abs/2101.03961, section 2.2. Per sequence:
DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.2.3. Over the global batch:
https://arxiv.org/abs/2501.11873). f counts the best k scores, without bias, groups and capacity. A
rank with part of the tokens computes a partial loss: the summed scores of local tokens over the
number of all tokens, with counts of all tokens. Partial losses add up to the loss. With
``global_aux_loss``, f covers the data-parallel ranks and micro-batches of the optimizer step so
far, and P covers one micro-batch. Like the main loss, ``global_aux_loss`` is averaged over
data-parallel ranks and micro-batches. (Megatron-Core divides P by the tokens of all data-parallel
ranks and also averages, so the coefficient shrinks with the number of ranks.)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_lightning.config.moe import LoadBalancing, MoEConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.moe.choice import widened


@dataclass(frozen=True)
class RouterLoss:
    """A loss of a router, to be added to the main loss."""

    name: str
    """aux_loss, seq_aux_loss, global_aux_loss or z_loss."""
    value: Tensor
    """[] this rank's part of the loss, without coefficient. Differentiable."""
    coefficient: float
    """Factor of the value in the total loss."""

    @property
    def weighted(self) -> Tensor:
        """The value times the coefficient."""
        return self.coefficient * self.value


def auxiliary_loss(
    scores: Tensor,
    tokens_per_expert: Tensor,
    moe: MoEConfig,
    *,
    kind: LoadBalancing | None = None,
) -> Tensor:
    """Return a balancing loss times the coefficient, averaged over the sequences if there are
    several.

    Args:
        scores: [t, E] or [s, b, E] scores of this rank's tokens. The scores of a token sum to 1.
        tokens_per_expert: [E] or [b, E] number of tokens with an expert among their best k, over
            all ranks with partial losses.
        moe: The layer's configuration.
        kind: Type that names the coefficient. Required if several types are configured.
    """
    coefficients = moe.auxiliary_losses
    if kind is None and len(coefficients) > 1:
        raise ConfigError(
            f"auxiliary_loss with moe.router_load_balancing_type={list(coefficients)}: each has a "
            "coefficient of its own. Pass kind."
        )
    coefficient = sum(coefficients.values()) if kind is None else coefficients.get(kind, 0.0)
    return coefficient * imbalance(scores, tokens_per_expert, moe)


def imbalance(
    scores: Tensor, tokens_per_expert: Tensor, moe: MoEConfig, over: Tensor | None = None
) -> Tensor:
    """Return the balancing loss without coefficient. The loss is 1 if all experts are used equally.

    ``over``: counts for the fractions, over more tokens than ``scores``.
    """

    def num_choices(counts: Tensor) -> Tensor:
        return counts.sum(dim=-1, keepdim=True).to(scores.dtype).clamp(min=moe.router_topk)

    over = tokens_per_expert if over is None else over
    means = scores.sum(dim=0) / (num_choices(tokens_per_expert) / moe.router_topk)
    return (means * (over / num_choices(over))).sum(dim=-1).mean() * moe.num_experts


def z_loss(logits: Tensor, moe: MoEConfig) -> Tensor:
    """Return the mean of logsumexp^2 over ``logits`` [t, E] times the coefficient (ST-MoE,
    https://arxiv.org/abs/2202.08906, section 3).
    """
    squares = widened(logits).logsumexp(dim=-1).square()
    return (moe.z_loss_coeff or 0.0) * squares.sum() / max(len(squares), 1)
