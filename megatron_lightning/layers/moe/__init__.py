"""Mixture of experts: which experts a token is sent to."""

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
    "Router",
    "RouterLoss",
    "Routing",
    "auxiliary_loss",
    "choose_experts",
    "expert_capacity",
    "route",
    "updated_expert_bias",
    "z_loss",
]
