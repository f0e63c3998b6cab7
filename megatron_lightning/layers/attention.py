"""Causal self-attention with a fused projection, grouped queries and rotary positions.

Shapes: ``s`` sequence, ``b`` batch, ``h`` hidden, ``n`` query heads, ``g`` query groups, ``d`` head
dim. Under tensor parallelism ``n`` and ``g`` are the rank's own; they are read from the tensor
shapes, so that no count needs rewriting.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.config import TransformerConfig
from megatron_lightning.layers.dropout import Dropout
from megatron_lightning.layers.norm import build_norm
from megatron_lightning.layers.rotary import RotaryEmbedding, apply_rotary


class CoreAttention(nn.Module):
    """Causal scaled dot product attention (torch's fused kernels).

    Args:
        dropout: Dropout probability of the attention weights.
        in_fp32: Compute scores, softmax and context in fp32, under autocast as well.
    """

    def __init__(self, dropout: float, *, in_fp32: bool = False) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.in_fp32 = in_fp32

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map queries [s, b, n, d], keys [s, b, g, d] and values [s, b, g, d] to contexts [s, b,
        n*d].
        """
        if self.in_fp32:
            with torch.autocast(q.device.type, enabled=False):
                return self._attend(q.float(), k.float(), v.float()).to(v.dtype)
        return self._attend(q, k, v)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.shape[2] != k.shape[2]
        q_bnsd, k_bgsd, v_bgsd = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        with self.dropout.stream():
            out = F.scaled_dot_product_attention(
                q_bnsd,
                k_bgsd,
                v_bgsd,
                dropout_p=self.dropout.active_p,
                is_causal=True,
                enable_gqa=grouped,
            )
        return out.permute(2, 0, 1, 3).flatten(2)


class SelfAttention(nn.Module):
    """Projection to queries, keys and values, attention, projection back.

    The rows of ``linear_qkv`` are grouped per query group: its n/g query heads, its key head, its
    value head, each of d rows.

    Args:
        config: Sizes.
        rotary: The model's rotary embedding; None: positions of another kind.
    """

    def __init__(self, config: TransformerConfig, rotary: RotaryEmbedding | None) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.heads_per_group = config.heads_per_group
        self.linear_qkv = nn.Linear(
            config.hidden_size, config.qkv_rows, bias=config.add_bias_linear or config.add_qkv_bias
        )
        rows = (config.heads_per_group * config.head_dim, config.head_dim, config.head_dim)
        self.linear_qkv.fused_rows = rows  # type: ignore[assignment]
        self.q_layernorm = build_norm(config, config.head_dim) if config.qk_layernorm else None
        self.k_layernorm = build_norm(config, config.head_dim) if config.qk_layernorm else None
        self.rotary = rotary
        self.core_attention = CoreAttention(
            config.attention_dropout, in_fp32=config.attention_softmax_in_fp32
        )
        projected = config.num_attention_heads * config.head_dim
        self.linear_proj = nn.Linear(projected, config.hidden_size, bias=config.add_bias_linear)

    def forward(self, hidden: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Map [s, b, h] to [s, b, h]; ``position_ids`` [b, s] replace the positions 0 to s-1.

        The input may be a sequence shard: the full length is known only after the projection has
        gathered it.
        """
        mixed = self.linear_qkv(hidden)
        mixed = mixed.view(*mixed.shape[:2], -1, self.heads_per_group + 2, self.head_dim)
        q, k, v = mixed.split([self.heads_per_group, 1, 1], dim=3)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        if self.rotary is not None:
            cosines, sines = self.rotary(q.shape[0], q, position_ids)
            q, k = apply_rotary(q, cosines, sines), apply_rotary(k, cosines, sines)
        out: Tensor = self.linear_proj(
            self.core_attention(q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3))
        )
        return out
