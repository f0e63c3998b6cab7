"""Gradient reduction in buckets, the distributed optimizer, norms and clipping, schedules and
parameter groups.
"""

from typing import TYPE_CHECKING

from megatron_lightning._lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lightning.optim.clipping import (
        clip_grads_by_norm_,
        clip_grads_by_value_,
        global_grad_norm,
    )
    from megatron_lightning.optim.gradients.buckets import Bucket
    from megatron_lightning.optim.gradients.reducer import GradientReducer
    from megatron_lightning.optim.growths import base_shapes
    from megatron_lightning.optim.loss_scale import DynamicLossScale
    from megatron_lightning.optim.lr_schedules import LRSchedule, ScheduledLR
    from megatron_lightning.optim.maximal_update import (
        GroupScaling,
        MaximalUpdate,
        Scaling,
        scale_eps,
    )
    from megatron_lightning.optim.param_groups import NO_DECAY, ParamGroup, make_param_groups
    from megatron_lightning.optim.stepping.chained import ChainedOptimizer
    from megatron_lightning.optim.stepping.distributed import DistributedOptimizer
    from megatron_lightning.optim.stepping.muon import Muon

__all__ = [
    "NO_DECAY",
    "Bucket",
    "ChainedOptimizer",
    "DistributedOptimizer",
    "DynamicLossScale",
    "GradientReducer",
    "GroupScaling",
    "LRSchedule",
    "MaximalUpdate",
    "Muon",
    "ParamGroup",
    "Scaling",
    "ScheduledLR",
    "base_shapes",
    "clip_grads_by_norm_",
    "clip_grads_by_value_",
    "global_grad_norm",
    "make_param_groups",
    "scale_eps",
]

lazy_attributes(
    __name__,
    {
        "Bucket": "megatron_lightning.optim.gradients.buckets",
        "ChainedOptimizer": "megatron_lightning.optim.stepping.chained",
        "DistributedOptimizer": "megatron_lightning.optim.stepping.distributed",
        "DynamicLossScale": "megatron_lightning.optim.loss_scale",
        "GradientReducer": "megatron_lightning.optim.gradients.reducer",
        "GroupScaling": "megatron_lightning.optim.maximal_update",
        "MaximalUpdate": "megatron_lightning.optim.maximal_update",
        "Scaling": "megatron_lightning.optim.maximal_update",
        "base_shapes": "megatron_lightning.optim.growths",
        "scale_eps": "megatron_lightning.optim.maximal_update",
        "LRSchedule": "megatron_lightning.optim.lr_schedules",
        "Muon": "megatron_lightning.optim.stepping.muon",
        "NO_DECAY": "megatron_lightning.optim.param_groups",
        "ParamGroup": "megatron_lightning.optim.param_groups",
        "ScheduledLR": "megatron_lightning.optim.lr_schedules",
        "clip_grads_by_norm_": "megatron_lightning.optim.clipping",
        "clip_grads_by_value_": "megatron_lightning.optim.clipping",
        "global_grad_norm": "megatron_lightning.optim.clipping",
        "make_param_groups": "megatron_lightning.optim.param_groups",
    },
)
