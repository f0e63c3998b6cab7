"""Mixture of experts: routing of tokens to experts, and balancing of the experts."""

from megatron_lightning.layers.moe.balance import balance_experts
from megatron_lightning.layers.moe.layer import MoELayer
from megatron_lightning.layers.moe.router import (
    Router,
    RouterLoss,
    Routing,
    auxiliary_loss,
    choose_experts,
    expert_capacity,
    route,
    updated_expert_bias,
    z_loss,
)

__all__ = [
    "MoELayer",
    "Router",
    "RouterLoss",
    "Routing",
    "auxiliary_loss",
    "balance_experts",
    "choose_experts",
    "expert_capacity",
    "route",
    "updated_expert_bias",
    "z_loss",
]
