"""Choice of each token's experts by the logits of a router, and the weights of the experts.

Shapes: ``t`` tokens, ``E`` experts, ``k`` experts of a token. Three sets of numbers per token and
expert are kept apart:

    logits   the router's GEMM
    scores   softmax, sigmoid or sqrt(softplus) of the logits. Scores plus a bias choose
             the experts. Losses use all scores, divided by their sum
    probs    weights of the chosen experts' outputs, 0 for all others
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.config.moe import MoEConfig
from megatron_lightning.errors import ConfigError

ChooseExperts = Callable[[Tensor, MoEConfig], Tensor]


def choose_experts(scores: Tensor, moe: MoEConfig) -> Tensor:
    """Return the indices [t, k] of the best experts by ``scores`` [t, E].

    With groups, choose only from the best groups.
    """
    k, groups, group_topk = moe.router_topk, moe.router_num_groups, moe.router_group_topk
    if groups is not None and group_topk is not None and moe.group_best is not None:
        grouped = scores.unflatten(1, (groups, -1))  # type: ignore[no-untyped-call]
        group_scores = grouped.topk(moe.group_best, dim=-1).values.sum(dim=-1)
        allowed = mask_at(group_scores, group_scores.topk(group_topk, dim=-1).indices)
        scores = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
    return scores.topk(k, dim=-1).indices


def route(
    logits: Tensor,
    moe: MoEConfig,
    expert_bias: Tensor | None = None,
    *,
    choose: ChooseExperts = choose_experts,
) -> tuple[Tensor, Tensor]:
    """Route every token to experts, up to the experts' capacity.

    Scores are computed in fp32, or in fp64 for fp64 logits.

    Args:
        logits: [t, E] outputs of the router's matmul.
        moe: The layer's configuration.
        expert_bias: [E] numbers added to the scores for the choice of experts.
        choose: Function of the scores [t, E], with bias, and ``moe``. Returns the indices of the
            chosen experts [t, k].

    Returns:
        Probabilities [t, E] in the dtype of ``logits``, 0 except for chosen experts, and whether an
        expert is chosen, [t, E]. With ``pad_expert_input_to_capacity`` additional tokens of
        probability 0 are marked as chosen, so that every expert has min(capacity, t) tokens.
    """
    limited = limit_tokens(*assign_experts(logits, moe, expert_bias, choose), moe)
    return limited.probs, limited.chosen


def assign_experts(
    logits: Tensor,
    moe: MoEConfig,
    expert_bias: Tensor | None,
    choose: ChooseExperts,
    given: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return probabilities and choices [t, E] before any token is dropped.

    ``given``: [t, k] experts in the place of the best experts. A negative entry: the token has
    none.
    """
    if logits.dim() != 2 or logits.shape[1] != moe.num_experts:
        raise ConfigError(
            f"logits have the shape {list(logits.shape)}, and moe.num_experts is "
            f"{moe.num_experts}; they need one column for each expert. Pass [tokens, "
            f"{moe.num_experts}]."
        )
    softmax = moe.router_score_function == "softmax"
    if softmax and expert_bias is not None:
        raise ConfigError(
            "expert_bias with moe.router_score_function=softmax: a bias is for scores of which "
            "each expert has its own. Set router_score_function to sigmoid or sqrtsoftplus."
        )
    if expert_bias is not None and expert_bias.shape != logits.shape[1:]:
        raise ConfigError(
            f"expert_bias has the shape {list(expert_bias.shape)}, and moe.num_experts is "
            f"{moe.num_experts}; every expert has one. Pass [{moe.num_experts}]."
        )
    scores = (
        widened(logits) if softmax and not moe.router_pre_softmax else router_scores(logits, moe)
    )
    # The bias decides who is chosen, and not the weight of the choice: it must not reach the
    # probabilities.
    ranked = scores.detach()
    indices = choose(ranked if expert_bias is None else ranked + expert_bias, moe)
    if given is not None:
        # Two sources would choose an expert of a token twice.
        is_whole = given.amin(1, keepdim=True) >= 0
        indices = torch.where(is_whole, given.long(), indices)
    weights = scores.gather(1, indices)
    # Softmax over the chosen logits alone, as Megatron does unless router_pre_softmax is set.
    if softmax and not moe.router_pre_softmax:
        weights = weights.softmax(dim=-1)
    elif not softmax and moe.router_topk > 1:
        weights = normalized(weights)
    if moe.router_topk_scaling_factor is not None:
        weights = weights * moe.router_topk_scaling_factor
    probs = torch.zeros_like(logits).scatter(1, indices, weights.to(logits.dtype))
    return probs, mask_at(logits, indices)


class Limited(NamedTuple):
    """Choices within the experts' capacity."""

    probs: Tensor
    """[t, E] weights. 0 for dropped choices."""
    chosen: Tensor
    """[t, E] tokens computed by each expert, including fillers."""
    num_dropped: Tensor
    """[] dropped choices."""


def limit_tokens(
    probs: Tensor, chosen: Tensor, moe: MoEConfig, is_padding: Tensor | None = None
) -> Limited:
    """Drop tokens above the experts' capacity, and fill experts up to the capacity if configured.

    The queue of an expert holds chosen tokens first, by probability or position, then all other
    tokens. Equal tokens keep their order. topk does not keep the order of equal values.

    Args:
        probs: [t, E] weights.
        chosen: [t, E] choices. Padding has none.
        moe: The layer's configuration.
        is_padding: [t] tokens without a share in the capacity. None: there are none.
    """
    length = expert_capacity(len(probs), moe)
    if length is None:
        return Limited(probs, chosen, chosen.new_zeros((), dtype=torch.int64))
    capacity: Tensor | int = length
    if is_padding is not None:
        capacity = _capacity_of((~is_padding).sum(), moe)
    rank = probs.detach() if moe.token_drop_policy == "probs" else torch.ones_like(probs)
    queue = rank.masked_fill(~chosen, -1.0).sort(dim=0, descending=True, stable=True).indices
    places = torch.arange(len(probs), device=probs.device)[:, None].expand_as(queue)
    position = torch.zeros_like(queue).scatter(0, queue, places)
    is_kept = chosen & (position < capacity)
    # Fillers give experts as many rows as without padding, so that the number is fixed.
    is_computed = position < length if moe.pad_expert_input_to_capacity else is_kept
    return Limited(probs * is_kept, is_computed, (chosen & ~is_kept).sum())


def expert_capacity(num_tokens: int, moe: MoEConfig) -> int | None:
    """Return the capacity of one expert for ``num_tokens`` tokens. None: unlimited."""
    if moe.expert_capacity_factor is None:
        return None
    # In Megatron-Core's order of operations, as a product may lie just above an integer.
    share = num_tokens * moe.router_topk / moe.num_experts
    return math.ceil(share * moe.expert_capacity_factor)


def _capacity_of(num_tokens: Tensor, moe: MoEConfig) -> Tensor:
    """Return :func:`expert_capacity` for a number on a device, without a wait for the device."""
    share = num_tokens.double() * moe.router_topk / moe.num_experts
    return (share * (moe.expert_capacity_factor or 0.0)).ceil()


def widened(logits: Tensor) -> Tensor:
    """Return logits in fp32. fp64 logits stay unchanged."""
    return logits if logits.dtype == torch.float64 else logits.float()


def router_scores(logits: Tensor, moe: MoEConfig) -> Tensor:
    """Return the scores of logits, both [..., E]. fp32, or fp64 for fp64 logits."""
    logits = widened(logits)
    if moe.router_score_function == "softmax":
        return logits.softmax(dim=-1)
    if moe.router_score_function == "sigmoid":
        return logits.sigmoid()
    # The slope of the root is infinite at 0, and softplus underflows to 0.
    return F.softplus(logits).clamp(min=torch.finfo(logits.dtype).tiny).sqrt()


def normalized(scores: Tensor) -> Tensor:
    """Return scores [..., E] divided by their sum."""
    return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)


def mask_at(like: Tensor, indices: Tensor) -> Tensor:
    """Return booleans of the shape of ``like``, true at ``indices`` of the last dim."""
    return torch.zeros_like(like, dtype=torch.bool).scatter(-1, indices, True)
