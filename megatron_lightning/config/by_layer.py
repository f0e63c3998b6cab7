"""Windows, rotary positions and linear attention of single layers. No torch here.

``window_size`` and ``rotary_base`` are options of the model. ``window_attn_skip_freq``,
``no_rope_freq`` and ``linear_attention_freq`` name the layers, by Megatron-Core's rules: a number n
means every n-th layer, counted from 1, and a list has an entry for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_lightning.config.delta_net import linear_layers
from megatron_lightning.config.value_checks import is_count
from megatron_lightning.errors import ConfigError

if TYPE_CHECKING:
    from megatron_lightning.config.transformer import TransformerConfig


def layer_config(config: TransformerConfig, index: int) -> TransformerConfig:
    """Return the configuration of layer ``index``. The fields that name layers are left out."""
    has_window = config.window_size is None or windowed_layers(config)[index]
    base, scaling, kind = config.rotary_base, config.rope_scaling, config.position_embedding_type
    if config.window_rotary_base is not None and has_window:
        base, scaling = config.window_rotary_base, None
    if unrotated_layers(config)[index]:
        kind, scaling = "none", None
    interleaved = config.rotary_interleaved and kind == "rope"
    window = config.window_size if has_window else None
    linear = _linear_frequency(config, index)
    if (window, base, scaling, kind, linear) == (
        config.window_size, config.rotary_base, config.rope_scaling, config.position_embedding_type,
        config.linear_attention_freq,
    ):  # fmt: skip
        return config
    return replace(
        config, window_size=window, window_attn_skip_freq=None, rotary_base=base,
        window_rotary_base=None, rope_scaling=scaling, position_embedding_type=kind,
        no_rope_freq=None, rotary_interleaved=interleaved, linear_attention_freq=linear,
    )  # fmt: skip


def _linear_frequency(config: TransformerConfig, index: int) -> tuple[int, ...] | None:
    """Return a ``linear_attention_freq`` that gives all layers the attention of layer ``index``."""
    if config.linear_attention_freq is None:
        return None
    is_linear = linear_layers(config.linear_attention_freq, config.num_layers)[index]
    return (int(is_linear),) * config.num_layers


def windowed_layers(config: TransformerConfig) -> tuple[bool, ...]:
    """Return whether each layer has a sliding window."""
    frequency, layers = config.window_attn_skip_freq, range(1, config.num_layers + 1)
    if config.window_size is None or frequency is None:
        return (config.window_size is not None,) * config.num_layers
    if isinstance(frequency, int):
        return tuple(number % frequency != 0 for number in layers)
    return tuple(bool(entry) for entry in frequency)


def unrotated_layers(config: TransformerConfig) -> tuple[bool, ...]:
    """Return whether each layer is without the rotary positions of the other layers."""
    frequency = config.no_rope_freq
    if frequency is None:
        return (False,) * config.num_layers
    if isinstance(frequency, int):
        return tuple(number % frequency == 0 for number in range(1, config.num_layers + 1))
    return tuple(bool(entry) for entry in frequency)


def check_windows(config: TransformerConfig) -> None:
    """Check the window and the layers with a window.

    Raises:
        ConfigError: If a value is wrong.
    """
    window = config.window_size
    if window is None:
        if config.window_attn_skip_freq is not None:
            raise ConfigError(
                f"window_attn_skip_freq is {config.window_attn_skip_freq}, and window_size is not "
                "set, so no layer has a window. Set window_size, or leave it out."
            )
        return
    if len(window) != 2 or window[0] < 0 or window[1] != 0:
        raise ConfigError(
            f"window_size is {window}; a position sees itself and some before it. Set it to "
            "(positions before, 0), or leave it unset."
        )
    _check_layers(config, "window_attn_skip_freq", "(window) or 0 (all positions)")


def check_delta_net(config: TransformerConfig) -> None:
    """Check gated delta net and the layers with it.

    Raises:
        ConfigError: If the sizes are set without such layers, or such layers without sizes, or
            options contradict each other.
    """
    _check_layers(config, "linear_attention_freq", "(gated delta net) or 0 (attention)")
    frequency = config.linear_attention_freq
    kinds = (*config.layer_kinds, *(config.depth_kinds if config.mtp_num_layers else ()))
    has_layers = frequency is not None or "delta_net" in kinds
    if has_layers is (config.delta_net is None):
        state = "is not set" if has_layers else "is set"
        raise ConfigError(
            f"delta_net {state}, linear_attention_freq is {frequency} and the kinds of the layers "
            f"are {', '.join(dict.fromkeys(kinds))}. Set delta_net together with "
            "linear_attention_freq, or with layers of the kind delta_net in layer_pattern."
        )
    if frequency == 1 and type(frequency) is int:
        raise ConfigError(
            "linear_attention_freq is 1, and every layer attends, as in Megatron-Core: a number n "
            "leaves attention in every n-th layer. Set it to 2 or more, or to a list of ones for "
            "gated delta net in all layers, or leave it and delta_net out."
        )
    if frequency is not None and isinstance(config.layer_pattern, str):
        raise ConfigError(
            f"linear_attention_freq is {frequency}, and layer_pattern is {config.layer_pattern!r}; "
            "both say which layers have gated delta net. Write G in layer_pattern, and leave "
            "linear_attention_freq out."
        )
    if (
        frequency is not None
        and config.mla is not None
        and any(linear_layers(frequency, config.num_layers))
    ):
        raise ConfigError(
            f"linear_attention_freq is {frequency} with mla, whose rotary positions gated delta "
            "net does not have. Leave one of them out."
        )


def _check_layers(config: TransformerConfig, name: str, meaning: str) -> None:
    frequency: int | Sequence[int] | None = getattr(config, name)
    if frequency is None or is_count(frequency):
        return
    entries = list(frequency) if isinstance(frequency, Sequence) else []
    are_flags = all(type(entry) is int and entry in (0, 1) for entry in entries)
    if not are_flags or len(entries) != config.num_layers:
        raise ConfigError(
            f"{name} is {frequency!r}, and num_layers is {config.num_layers}. Set it to a positive "
            f"integer n, for every n-th layer, or to a list with 1 {meaning} for each layer."
        )


def check_rotary(config: TransformerConfig) -> None:
    """Check the bases and the scaling of rotary frequencies, and the layers with such positions.

    Raises:
        ConfigError: If a value is wrong, or options contradict each other.
    """
    for name in ("rotary_base", "window_rotary_base"):
        base = getattr(config, name)
        if base is not None and not 0.0 < base < float("inf"):
            raise ConfigError(
                f"{name} is {base}; rotary frequencies are its powers. Set it above 0."
            )
    kind = config.position_embedding_type
    for name in ("rope_scaling", "window_rotary_base", "no_rope_freq", "rotary_interleaved"):
        if kind != "rope" and getattr(config, name) not in (None, False):
            raise ConfigError(
                f"{name} is set, and position_embedding_type={kind} has no rotary frequencies. "
                "Leave it out, or set position_embedding_type to rope."
            )
    if config.window_rotary_base is not None and config.window_size is None:
        raise ConfigError(
            f"window_rotary_base is {config.window_rotary_base}, and window_size is not set, so no "
            "layer has a window. Set window_size, or leave it out."
        )
    if config.no_rope_freq is not None and config.mla is not None:
        raise ConfigError(
            f"no_rope_freq is {config.no_rope_freq}, and mla has channels for rotary positions "
            "alone. Leave no_rope_freq out."
        )
    _check_layers(config, "no_rope_freq", "(no rotary positions) or 0")
    scaling = config.rope_scaling
    if scaling is not None and scaling.rope_type == "yarn" and config.rotary_base <= 1.0:
        raise ConfigError(
            f"rotary_base={config.rotary_base} with rope_scaling.rope_type=yarn: yarn looks for "
            "the channel of a frequency, and frequencies do not fall from channel to channel. "
            "Set rotary_base above 1."
        )
    for name in ("short_factor", "long_factor"):
        divisors = () if scaling is None else getattr(scaling, name) or ()
        if divisors and len(divisors) != config.rotary_dim // 2:
            raise ConfigError(
                f"rope_scaling.{name} has {len(divisors)} entries, and {config.rotary_dim} rotated "
                f"channels of a head have {config.rotary_dim // 2} frequencies. Set an entry for "
                "each frequency."
            )
