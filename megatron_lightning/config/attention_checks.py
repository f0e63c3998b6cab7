"""Checks of the options of attention. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_lightning.errors import ConfigError

if TYPE_CHECKING:
    from megatron_lightning.config.transformer import TransformerConfig


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


def check_heads(config: TransformerConfig) -> None:
    """Check the number and the size of heads.

    Raises:
        ConfigError: Naming the values and the fix.
    """
    heads, groups = config.num_attention_heads, config.query_groups
    if config.mla is None and config.kv_channels is None and config.hidden_size % heads:
        raise ConfigError(
            f"hidden_size={config.hidden_size} is not divisible by num_attention_heads={heads}, "
            "so a head has no size. Set kv_channels, or a hidden_size that is a multiple of "
            "the heads."
        )
    if heads % groups:
        raise ConfigError(
            f"num_attention_heads={heads} is not divisible by num_query_groups={groups}; each "
            "key/value head serves equally many query heads. Set num_query_groups to a "
            "divisor of the heads."
        )
    if config.position_embedding_type == "rope" and (
        config.rotary_dim < 2 or config.rotary_dim % 2
    ):
        raise ConfigError(
            f"rotary_percent={config.rotary_percent} of kv_channels={config.head_dim} rotates "
            f"{config.rotary_dim} channels; rotation works on pairs within a head. Set both so "
            "that the product is even, and at most kv_channels."
        )
    if config.rotary_percent > 1.0:
        raise ConfigError(
            f"rotary_percent is {config.rotary_percent}; a head has no more to rotate. Set it to "
            "at most 1."
        )


def check_head_norms(config: TransformerConfig) -> None:
    """Check norms over all heads.

    Raises:
        ConfigError: Naming the values and the fix.
    """
    if config.qk_layernorm_per_head:
        return
    if not config.qk_layernorm or config.normalization != "RMSNorm":
        raise ConfigError(
            f"qk_layernorm_per_head=False with qk_layernorm={config.qk_layernorm} and "
            f"normalization={config.normalization}: norms over all heads are RMSNorms of queries "
            "and keys. Set qk_layernorm to True and normalization to RMSNorm, or leave "
            "qk_layernorm_per_head out."
        )


def check_scores(config: TransformerConfig) -> None:
    """Check caps and sinks of attention scores.

    Raises:
        ConfigError: If kernels named by the user, or dropout, cannot be combined with the scores.
    """
    softcap, backend = config.attn_logit_softcapping, config.attention_backend
    if softcap is not None and backend not in ("auto", "math"):
        raise ConfigError(
            f"attn_logit_softcapping={softcap} with attention_backend={backend}, whose kernels "
            "have no soft caps of scores. Set attention_backend to auto or math."
        )
    if config.attention_dropout and (softcap is not None or config.num_sinks):
        raise ConfigError(
            f"attention_dropout={config.attention_dropout} cannot be combined with "
            f"attn_logit_softcapping={softcap} and softmax_type={config.softmax_type}. Set "
            "attention_dropout to 0."
        )
