"""Gradient reduction in buckets, the distributed optimizer, norms and clipping."""

from typing import TYPE_CHECKING

from megatron_lightning._lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lightning.optim.buckets import Bucket, Fragment
    from megatron_lightning.optim.clipping import clip_grads_by_norm_, clip_grads_by_value_, global_grad_norm
    from megatron_lightning.optim.distributed import DistributedOptimizer, StateTensor
    from megatron_lightning.optim.loss_scale import DynamicLossScale
    from megatron_lightning.optim.reducer import GradientReducer

__all__ = [
    "Bucket",
    "DistributedOptimizer",
    "DynamicLossScale",
    "Fragment",
    "GradientReducer",
    "StateTensor",
    "clip_grads_by_norm_",
    "clip_grads_by_value_",
    "global_grad_norm",
]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "Bucket": "megatron_lightning.optim.buckets",
        "DistributedOptimizer": "megatron_lightning.optim.distributed",
        "DynamicLossScale": "megatron_lightning.optim.loss_scale",
        "Fragment": "megatron_lightning.optim.buckets",
        "GradientReducer": "megatron_lightning.optim.reducer",
        "StateTensor": "megatron_lightning.optim.distributed",
        "clip_grads_by_norm_": "megatron_lightning.optim.clipping",
        "clip_grads_by_value_": "megatron_lightning.optim.clipping",
        "global_grad_norm": "megatron_lightning.optim.clipping",
    },
)
