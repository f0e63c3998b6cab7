"""The norms of the transformer: torch's own RMSNorm (https://arxiv.org/abs/1910.07467) and
LayerNorm, chosen by the config.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.config import TransformerConfig


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


def build_norm(config: TransformerConfig, size: int) -> nn.Module:
    """Return the config's norm over a last dim of ``size``: hidden_size, or kv_channels for query
    and key norms.
    """
    rms, layer = (
        (MixedRMSNorm, MixedLayerNorm)
        if config.fp32_residual_connection
        else (nn.RMSNorm, nn.LayerNorm)
    )
    kind = rms if config.normalization == "RMSNorm" else layer
    return kind(size, eps=config.layernorm_epsilon)
