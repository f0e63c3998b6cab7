"""Multi-head latent attention (https://arxiv.org/abs/2405.04434, section 2.1): queries, keys and
values are computed from latents narrower than all heads together.

Shapes: ``s`` sequence, ``b`` batch, ``h`` hidden, ``n`` heads, ``d`` channels of a query or key
head without a position, ``r`` rotated channels, ``e`` size of a value head.

    hidden --- linear_q_down_proj --- q_layernorm --- linear_q_up_proj ----- n (d | r)  queries
       |
       +------ linear_kv_down_proj -+- kv_layernorm - linear_kv_up_proj ---- n (d | e)  keys, values
                                    +- shared_key -------------------------- r          key

Weight rows follow Megatron-Core and DeepSeek's checkpoints: the channels of a head without a
position come first, and two neighboring rotated channels form a pair. After the rotation the first
channels of all pairs precede the second channels, in queries and keys alike.

Under tensor parallelism every rank computes latents and the shared key. Under sequence parallelism
a rank computes only its tokens. ``linear_q_up_proj``, ``linear_kv_up_proj`` and ``shared_key``
gather latents and sum gradients, because each rank has only part of the heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_lightning.config import LatentAttentionConfig, TransformerConfig
from megatron_lightning.layers.attention.rotary import RotaryEmbedding, apply_rotary, score_factor
from megatron_lightning.layers.attention.self_attention import build_core
from megatron_lightning.layers.attention.sequence_info import SequenceInfo, rotary_places
from megatron_lightning.layers.linear.gemm import Gemm, by_heads
from megatron_lightning.layers.norm import build_norm


class LatentAttention(nn.Module):
    """Projections to latents, from latents to heads, attention, projection back.

    Args:
        config: Sizes of the model.
        mla: Sizes of latents and heads.
        rotary: The model's rotary embedding.
    """

    def __init__(
        self, config: TransformerConfig, mla: LatentAttentionConfig, rotary: RotaryEmbedding
    ) -> None:
        super().__init__()
        h, n = config.hidden_size, config.num_attention_heads
        self.mla = mla
        if mla.q_lora_rank is None:
            self.linear_q_proj = nn.Linear(h, n * mla.q_head_dim, bias=False)
        else:
            self.linear_q_down_proj = nn.Linear(h, mla.q_lora_rank, bias=False)
            self.q_layernorm = _build_norm(config, mla.q_lora_rank)
            self.linear_q_up_proj = nn.Linear(mla.q_lora_rank, n * mla.q_head_dim, bias=False)
        self.linear_kv_down_proj = nn.Linear(
            h, mla.kv_lora_rank + mla.qk_pos_emb_head_dim, bias=False
        )
        self.kv_layernorm = _build_norm(config, mla.kv_lora_rank)
        self.linear_kv_up_proj = nn.Linear(
            mla.kv_lora_rank, n * (mla.qk_head_dim + mla.v_head_dim), bias=False
        )
        self.shared_key = nn.Identity()
        """Point of entry of the shared key into the heads of a rank."""
        self.rotary = rotary
        self.scale = mla.q_head_dim**-0.5 * score_factor(config.rope_scaling)
        self.core_attention = build_core(config)
        self.linear_proj = nn.Linear(n * mla.v_head_dim, h, bias=False)

    def forward(self, hidden: Tensor, sequence: SequenceInfo | None = None) -> Tensor:
        """Map [s, b, h] to [s, b, h]. ``sequence`` None: causal, at positions 0 to s-1.

        The input may be a sequence shard. The full length is known only after the projections
        gather the sequence.

        Raises:
            ConfigError: If ranks share the sequence, and no positions are passed.
        """
        mla = self.mla
        self.core_attention.check_positions(sequence)
        # With adapters the up projection is more than the weight. The cache then stores heads
        # instead of latents.
        is_plain = not any(True for _ in self.linear_kv_up_proj.children())
        if sequence is not None and sequence.cache is not None and is_plain:
            return self._forward_cached(hidden, sequence)
        # d: parts without positions, r: rotated parts. Keys have one rotated part for all heads.
        q_sbnd, q_sbnr = torch.split(
            self._queries(hidden), [mla.qk_head_dim, mla.qk_pos_emb_head_dim], -1
        )
        latent, key_sbr = torch.split(
            self.linear_kv_down_proj(hidden), [mla.kv_lora_rank, mla.qk_pos_emb_head_dim], -1
        )
        # The projection gathers the sequence, and the shared key has to be gathered, too.
        heads = self.linear_kv_up_proj(self.kv_layernorm(latent))
        heads = heads.unflatten(-1, (-1, mla.qk_head_dim + mla.v_head_dim))
        k_sbnd, v_sbne = torch.split(heads, [mla.qk_head_dim, mla.v_head_dim], -1)
        cosines, sines = self.rotary(q_sbnd.shape[0], q_sbnd, *rotary_places(sequence))
        q_sbnr = apply_rotary(q_sbnr, cosines, sines, interleaved=True)
        key_sbr = apply_rotary(self.shared_key(key_sbr), cosines, sines, interleaved=True)
        k_sbnr = key_sbr.unsqueeze(2).expand_as(q_sbnr)
        context = self.core_attention(
            torch.cat((q_sbnd, q_sbnr), -1),
            torch.cat((k_sbnd, k_sbnr), -1),
            v_sbne,
            sequence,
            self.scale,
        )
        out: Tensor = self.linear_proj(context)
        return out

    def _forward_cached(self, hidden: Tensor, sequence: SequenceInfo) -> Tensor:
        """Run :meth:`forward` for new tokens of requests, with cached latents and shared keys.

        A slot stores one latent and one rotated key for all heads together. The up projection is
        *absorbed*: the rows for keys map queries into the latent space, and the rows for values map
        the context back (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.2).
        """
        mla, core = self.mla, self.core_attention
        q_sbnd, q_sbnr = torch.split(
            self._queries(hidden), [mla.qk_head_dim, mla.qk_pos_emb_head_dim], -1
        )
        latent, key_sbr = torch.split(
            self.linear_kv_down_proj(hidden), [mla.kv_lora_rank, mla.qk_pos_emb_head_dim], -1
        )
        cosines, sines = self.rotary(q_sbnd.shape[0], q_sbnd, *rotary_places(sequence))
        q_sbnr = apply_rotary(q_sbnr, cosines, sines, interleaved=True)
        key_sbr = apply_rotary(self.shared_key(key_sbr), cosines, sines, interleaved=True)
        latent = self.kv_layernorm(latent)
        if len(latent) < len(key_sbr):  # a sequence shard: the up projection would gather
            latent = self.shared_key(latent)
        # Absorption: q k = q (W_k c) = (W_k^T q) c for a latent c. All heads then attend to the
        # latents themselves, and W_v maps the weighted latents to values afterwards.
        up = self.linear_kv_up_proj
        weight = getattr(up, "gemm", Gemm()).value(up.weight, latent.dtype)
        rows = weight.view(-1, mla.qk_head_dim + mla.v_head_dim, mla.kv_lora_rank)
        to_keys, to_values = torch.split(rows, [mla.qk_head_dim, mla.v_head_dim], 1)
        q = torch.cat((by_heads(q_sbnd, to_keys), q_sbnr), -1)
        stored_keys = torch.cat((latent, key_sbr), -1).unsqueeze(2)
        context = core(q, stored_keys, None, sequence, self.scale).view(q.shape)
        values = by_heads(context[..., : mla.kv_lora_rank], to_values.transpose(1, 2))
        out: Tensor = self.linear_proj(values.flatten(2))
        return out

    def _queries(self, hidden: Tensor) -> Tensor:
        """Map [s, b, h] to [s, b, n, d + r]."""
        q: Tensor
        if self.mla.q_lora_rank is None:
            q = self.linear_q_proj(hidden)
        else:
            q = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))
        return q.view(*q.shape[:-1], -1, self.mla.q_head_dim)


def _build_norm(config: TransformerConfig, size: int) -> nn.Module:
    return build_norm(config, size) if config.qk_layernorm else nn.Identity()
