"""Sizes and checks of multi-head latent attention (https://arxiv.org/abs/2405.04434, section 2.1).

Names follow Megatron-Core's ``MLATransformerConfig``. DeepSeek's checkpoints use other names:
``qk_head_dim`` is DeepSeek's ``qk_nope_head_dim``, and ``qk_pos_emb_head_dim`` DeepSeek's
``qk_rope_head_dim``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_lightning.config.value_checks import is_count
from megatron_lightning.errors import ConfigError

if TYPE_CHECKING:
    from megatron_lightning.config.transformer import TransformerConfig

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


def check_latent_attention(config: TransformerConfig) -> None:
    """Check that no option contradicts latent attention.

    Raises:
        ConfigError: Naming the values and the fix.
    """
    if config.mla is None:
        return
    heads = config.num_attention_heads
    if config.num_query_groups not in (None, heads):
        raise ConfigError(
            f"num_query_groups={config.num_query_groups} with mla: each of the "
            f"num_attention_heads={heads} has a key and a value of its own, from the latent. "
            "Leave num_query_groups out."
        )
    if config.position_embedding_type != "rope":
        raise ConfigError(
            f"position_embedding_type={config.position_embedding_type} with mla: its "
            f"qk_pos_emb_head_dim={config.mla.qk_pos_emb_head_dim} channels are for rotary "
            "positions. Set position_embedding_type to rope."
        )
    unused_options = {
        "kv_channels": (None, "mla has sizes for heads, qk_head_dim and v_head_dim"),
        "rotary_percent": (1.0, "mla.qk_pos_emb_head_dim channels of a head are rotated"),
        "rotary_interleaved": (False, "neighboring channels are rotated in any case"),
        "add_qkv_bias": (False, "there is no linear_qkv"),
        "qk_layernorm_per_head": (True, "latents are not divided into heads"),
        "attention_output_gate": (False, "latent attention has no gates in any model so far"),
        "softmax_type": ("vanilla", "latents have no sinks in any model so far"),
        "attn_logit_softcapping": (None, "scores of latents are capped in no model so far"),
        "softmax_scale": (None, "scores are scaled by the size of a head and rope_scaling"),
        "add_bias_linear": (
            False,
            "Megatron-Core's projections to latents and heads have no bias, and DeepSeek's "
            "may have one",
        ),
    }
    for name, (expected, reason) in unused_options.items():
        if getattr(config, name) != expected:
            raise ConfigError(
                f"{name}={getattr(config, name)} with mla: {reason}. Leave {name} out."
            )
