"""Options of routers, and a dense reference with masks in place of indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.config.moe import MoEConfig

SIGMOID: dict[str, Any] = {"router_score_function": "sigmoid"}
EARLY: dict[str, Any] = {"router_pre_softmax": True}
KINDS: list[dict[str, Any]] = [
    {},
    {"router_pre_softmax": True},
    {"router_pre_softmax": True, "router_topk": 1},
    {"router_topk": 8},
    SIGMOID,
    {**SIGMOID, "router_topk": 1},
    {"router_score_function": "sqrtsoftplus", "router_topk_scaling_factor": 2.5},
    {**SIGMOID, "router_num_groups": 4, "router_group_topk": 2, "router_topk": 4},
    {"router_num_groups": 2, "router_group_topk": 1},
    {"router_num_groups": 2, "router_group_topk": 1, "router_group_best": 1},
]


def config(**options: Any) -> MoEConfig:
    return MoEConfig(**{"num_experts": 8, **options})


def dense_route(
    logits: Tensor, moe: MoEConfig, expert_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Routing by comparisons with the k-th best value, for values without ties."""
    softmax, k = moe.router_score_function == "softmax", moe.router_topk
    function: Callable[[Tensor], Tensor] = {
        "softmax": lambda x: x.softmax(-1),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
    }[moe.router_score_function]
    late = softmax and not moe.router_pre_softmax
    scores = logits if late else function(logits)
    ranked = scores.detach() + (0.0 if expert_bias is None else expert_bias)
    if moe.router_num_groups:
        grouped = ranked.view(len(ranked), moe.router_num_groups, -1)
        best = (
            grouped.sort(-1, True)
            .values[..., : moe.router_group_best or k // moe.router_group_topk]
            .sum(-1)
        )
        allowed = best >= best.sort(-1, True).values[:, moe.router_group_topk - 1, None]
        ranked = grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
    chosen = ranked >= ranked.sort(-1, True).values[:, k - 1, None]
    if late:
        probs = logits.masked_fill(~chosen, -torch.inf).softmax(-1)
    else:
        probs = scores * chosen
        if not softmax and k > 1:
            probs = probs / probs.sum(-1, keepdim=True)
    return probs * (moe.router_topk_scaling_factor or 1.0), chosen


def best_scores(logits: Tensor, moe: MoEConfig) -> tuple[Tensor, Tensor]:
    """Scores with sum 1 and the tokens per expert, as the losses use them."""
    function = {"softmax": torch.exp, "sigmoid": torch.sigmoid}.get(
        moe.router_score_function, lambda x: F.softplus(x).sqrt()
    )
    scores = function(logits) / function(logits).sum(-1, keepdim=True)
    return scores, (scores >= scores.sort(-1, True).values[..., moe.router_topk - 1, None]).sum(0)


def dense_loss(logits: Tensor, moe: MoEConfig) -> Tensor:
    """E sum_e f_e P_e of one batch of tokens."""
    scores, counts = best_scores(logits, moe)
    return moe.num_experts * (scores.mean(0) * counts / counts.sum()).sum()
