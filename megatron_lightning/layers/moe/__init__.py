"""Mixture of experts: routing of tokens to experts, and balancing of the experts."""

from megatron_lightning.layers.moe.balance import balance_experts, updated_expert_bias
from megatron_lightning.layers.moe.choice import choose_experts, expert_capacity, route
from megatron_lightning.layers.moe.layer import MoELayer
from megatron_lightning.layers.moe.losses import RouterLoss, auxiliary_loss, z_loss
from megatron_lightning.layers.moe.router import Router, Routing

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
