"""The norms of the transformer: torch's own RMSNorm (https://arxiv.org/abs/1910.07467) and
LayerNorm, chosen by the config.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.config import TransformerConfig
from megatron_lightning.parallel.collectives import copy_to_axis, reduce_from_axis
from megatron_lightning.parallel.context import AxisGroup


class MixedRMSNorm(nn.RMSNorm):
    """RMSNorm of an input that is more precise than the weight: computed in the input's dtype,
    returned in the weight's.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., size]."""
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps).to(
            self.weight.dtype
        )


class MixedLayerNorm(nn.LayerNorm):
    """LayerNorm of an input that is more precise than the weight; dtypes as in
    :class:`MixedRMSNorm`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize [..., size]."""
        if input.dtype == self.weight.dtype:
            return super().forward(input)
        weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps).to(
            self.weight.dtype
        )


class HeadsRMSNorm(nn.Module):
    """RMSNorm over all heads of a token, of which a rank has some; ranks may share them, each
    equally often (:class:`SharedGroupsLinear`).

    Every rank has the full weight and uses the part of its heads; the gradient is a partial sum.

    Args:
        norm: The norm over all heads.
        group: Ranks over which the heads are split.
    """

    def __init__(self, norm: nn.RMSNorm, group: AxisGroup) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.eps or 0.0
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the heads [..., width] of this rank."""
        width, group = x.shape[-1], self.group
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # Each rank's heads use the mean, so that its gradient is a sum over the ranks as well.
        total = reduce_from_axis(wide.square().mean(-1, keepdim=True), group)
        mean = copy_to_axis(total, group) / group.size
        num_parts = self.weight.numel() // width
        first = group.rank * num_parts // group.size * width
        weight = self.weight.narrow(0, first, width)
        return (wide * (mean + self.eps).rsqrt() * weight.to(wide.dtype)).to(x.dtype)


def build_norm(config: TransformerConfig, size: int) -> nn.Module:
    """Return the config's norm over a last dim of ``size``."""
    rms, layer = (
        (MixedRMSNorm, MixedLayerNorm)
        if config.fp32_residual_connection
        else (nn.RMSNorm, nn.LayerNorm)
    )
    kind = rms if config.normalization == "RMSNorm" else layer
    return kind(size, eps=config.layernorm_epsilon)
