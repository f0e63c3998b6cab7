"""Fields of ``adapter_config.json``: without an effect, refused, and by layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from megatron_lightning.errors import ConfigError

_ANY = frozenset((
    "peft_type", "task_type", "auto_mapping", "peft_version", "inference_mode", "megatron_core",
    "fan_in_fan_out", "layers_to_transform", "layers_pattern", "qalora_group_size",
    "ensure_weight_tying", "target_parameters_order",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config",
))  # fmt: skip
"""Fields without an effect on existing tensors."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "bias": ("none",),
        "runtime_config": ({}, {"ephemeral_gpu_offload": False}),
    }
)
"""Field -> values without an effect. For fields not named here: None, False and empty values."""


def refuse_effects(config: Mapping[str, Any], read: Collection[str], file: object) -> None:
    """Check that a configuration has no field with an effect beside the ``read`` fields. A newer
    ``peft`` writes fields for what a folder does not use.

    Raises:
        ConfigError: Naming the field.
    """
    for key, value in config.items():
        if key in read or key in _ANY:
            continue
        neutral = value in _NEUTRAL[key] if key in _NEUTRAL else not value
        if not neutral:
            raise ConfigError(
                f"{file} has {key}={value!r}, which is not supported: adapters are LoRA (rsLoRA, "
                "DoRA) and VeRA of linear layers. Train without that field, or merge it into its "
                "base by peft (merge_and_unload)."
            )


def exceptions(values: Mapping[str, Any], usual: Any) -> dict[str, Any]:
    """Return path -> value for unusual values. The last segment replaces a path if all paths with
    this segment agree.
    """
    names: dict[str, set[Any]] = {}
    for path, value in values.items():
        names.setdefault(path.rpartition(".")[2], set()).add(value)
    single_names = {
        name: next(iter(names_of_value))
        for name, names_of_value in names.items()
        if len(names_of_value) == 1
    }
    single_names |= {
        path: v for path, v in values.items() if len(names[path.rpartition(".")[2]]) > 1
    }
    return {key: value for key, value in single_names.items() if value != usual}


def whole(value: float) -> float | int:
    """Return a whole number as an int, after rounding off the last bits of a division."""
    near = round(value, 9)
    return int(near) if near == int(near) else near
