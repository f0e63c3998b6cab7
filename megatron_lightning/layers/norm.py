"""The norms of the transformer: torch's own RMSNorm (https://arxiv.org/abs/1910.07467) and LayerNorm, chosen by the config."""

from __future__ import annotations

from torch import nn

from megatron_lightning.config import TransformerConfig


def build_norm(config: TransformerConfig, size: int) -> nn.Module:
    """Return the config's norm over the last dim.

    Args:
        config: States the kind and the epsilon.
        size: Extent of the last dim (hidden_size, or kv_channels for query and key norms).
    """
    kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
    return kind(size, eps=config.layernorm_epsilon)
