"""Checks of numbers, heads, activation and residual stream of a transformer, and groups of options
from checkpoints. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from megatron_lightning.errors import ConfigError

if TYPE_CHECKING:
    from megatron_lightning.config.transformer import TransformerConfig

_NOT_NEGATIVE = ("layernorm_epsilon", "init_method_std", "z_loss", "mtp_loss_scaling_factor")
_FACTORS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
_OPTIONAL_FACTORS = ("softmax_scale", "attn_logit_softcapping", "final_logit_softcapping")
_PROBABILITIES = ("hidden_dropout", "attention_dropout", "label_smoothing")
_OPTIONAL_PROBABILITIES = ("embedding_dropout",)


def check_numbers(config: TransformerConfig) -> None:
    """Check the ranges of numbers.

    Raises:
        ConfigError: If a number is out of range.
    """
    for name in _NOT_NEGATIVE:
        value = getattr(config, name)
        if not 0.0 <= value < float("inf"):
            raise ConfigError(f"{name} is {value}; it cannot be below 0. Set it to 0 or more.")
    for name in (*_FACTORS, *_OPTIONAL_FACTORS):
        value = getattr(config, name)
        if not (value is None and name in _OPTIONAL_FACTORS) and not 0.0 < value < float("inf"):
            raise ConfigError(
                f"{name} is {value}; it multiplies or divides activations. Set it above 0."
            )
    for name in (*_PROBABILITIES, *_OPTIONAL_PROBABILITIES):
        value = getattr(config, name)
        if not (value is None and name in _OPTIONAL_PROBABILITIES) and not 0.0 <= value < 1.0:
            raise ConfigError(
                f"{name} is {value}; it is a probability. Set it to 0 or more and below 1."
            )


def check_residual_stream(config: TransformerConfig) -> None:
    """Check the dtype of the residual stream.

    Raises:
        ConfigError: If layers would read the stream in fp32 without a norm.
    """
    if config.norm_placement == "post" and config.fp32_residual_connection:
        raise ConfigError(
            "norm_placement=post with fp32_residual_connection=True: attention and "
            "feed-forward would read the stream in fp32, without a norm that returns their "
            "dtype. Set fp32_residual_connection to False, or norm_placement to sandwich."
        )


def check_activation(config: TransformerConfig) -> None:
    """Check the options of the feed-forward activation.

    Raises:
        ConfigError: If a value is wrong, or the activation has no such option.
    """
    limit, offset = config.activation_func_clamp_value, config.glu_linear_offset
    if limit is not None and not 0.0 < limit < float("inf"):
        raise ConfigError(
            f"activation_func_clamp_value is {limit}, and values are limited to its size. Set "
            "it above 0, or leave it out."
        )
    if not config.gated and (limit is not None or offset):
        raise ConfigError(
            f"activation_func_clamp_value={limit} and glu_linear_offset={offset} are options "
            f"of gated activations, and activation is {config.activation}. Leave them out."
        )


def restore_group(config: TransformerConfig, name: str, kind: type[Any]) -> None:
    """Rebuild a group of options from a checkpoint's dict.

    Args:
        config: The model.
        name: Field of the group.
        kind: Class of the group.

    Raises:
        ConfigError: If an option is unknown, or the field holds another object.
    """
    group = getattr(config, name)
    if isinstance(group, Mapping):
        known_names = [field.name for field in fields(kind)]
        for option in group:
            if option not in known_names:
                raise ConfigError(
                    f"{name}.{option} is unknown. Set one of {', '.join(known_names)}."
                )
        object.__setattr__(config, name, kind(**group))
    elif group is not None and not isinstance(group, kind):
        raise ConfigError(
            f"{name} is {group!r}, which describes no {kind.__name__}. Set it to one, or leave "
            "it out."
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
