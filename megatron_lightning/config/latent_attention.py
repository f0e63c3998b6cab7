"""Sizes of multi-head latent attention (https://arxiv.org/abs/2405.04434, section 2.1).

Names follow Megatron-Core's ``MLATransformerConfig``. DeepSeek's checkpoints use other names:
``qk_head_dim`` is DeepSeek's ``qk_nope_head_dim``, and ``qk_pos_emb_head_dim`` DeepSeek's
``qk_rope_head_dim``.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lightning.config.value_checks import is_count
from megatron_lightning.errors import ConfigError

_COUNTS = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Ranks of the latents and sizes of the heads."""

    q_lora_rank: int | None = 512
    """Width of the latent of the queries. None: queries are computed from the hidden states."""
    kv_lora_rank: int = 512
    """Width of the latent of keys and values."""
    qk_head_dim: int = 128
    """Channels of a query or key head without a position."""
    qk_pos_emb_head_dim: int = 64
    """Rotated channels of a query head, and of the single key shared by all heads. Even."""
    v_head_dim: int = 128
    """Size of a value head."""

    def __post_init__(self) -> None:
        for name in (*_COUNTS, *(() if self.q_lora_rank is None else ("q_lora_rank",))):
            value = getattr(self, name)
            if not is_count(value):
                raise ConfigError(f"mla.{name} is {value!r}; it must be a positive integer.")
        if self.qk_pos_emb_head_dim % 2:
            raise ConfigError(
                f"mla.qk_pos_emb_head_dim is {self.qk_pos_emb_head_dim}; rotation works on pairs "
                "of channels. Set it to an even number."
            )

    @property
    def q_head_dim(self) -> int:
        """Size of a query or key head."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    def num_parameters(self, hidden_size: int, num_heads: int, *, norms: int) -> int:
        """Return the number of parameters of a layer's attention. ``norms``: parameters per channel
        in the norm of a latent.
        """
        rank, heads = self.q_lora_rank, num_heads * self.q_head_dim
        queries = hidden_size * heads
        if rank is not None:
            queries = (hidden_size + heads + norms) * rank
        keys_and_values = num_heads * (self.qk_head_dim + self.v_head_dim)
        latent = (hidden_size + keys_and_values + norms) * self.kv_lora_rank
        shared_key = hidden_size * self.qk_pos_emb_head_dim
        return queries + latent + shared_key + num_heads * self.v_head_dim * hidden_size
