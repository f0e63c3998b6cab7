"""Sizes asked of a smaller model, and the configuration of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_lightning.bridge.family_rules.settings import build_config, flat
from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.models.blueprint import saved_tensors

_BY_LAYER = ("moe.layer_freq", "window_attn_skip_freq", "linear_attention_freq", "no_rope_freq")
_FIELDS: Mapping[str, str] = {
    "ffn_hidden_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_moe_experts": "moe.num_experts",
    "hidden_size": "hidden_size",
}


@dataclass(frozen=True)
class Sizes:
    """Sizes to prune to. None: as the model has.

    Raises:
        ConfigError: If there is nothing to prune, or depth is asked for twice.
    """

    ffn_hidden_size: int | None = None
    num_attention_heads: int | None = None
    hidden_size: int | None = None
    num_moe_experts: int | None = None
    num_layers: int | None = None
    drop_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_layers is not None and self.drop_layers:
            raise ConfigError(
                f"num_layers is {self.num_layers} and drop_layers is {list(self.drop_layers)}: "
                "name the layers to drop, or how many to keep by the statistics."
            )
        if not (self.needs_statistics or self.drop_layers):
            raise ConfigError(
                "no size is named, so there is nothing to prune. Set some of "
                f"{', '.join(_FIELDS)}, num_layers or drop_layers."
            )

    @property
    def widths(self) -> dict[str, int]:
        """Kind of unit -> number to keep, in every layer."""
        asked = {name: getattr(self, name) for name in _FIELDS}
        return {name: size for name, size in asked.items() if size is not None}

    @property
    def asked(self) -> str:
        """The sizes, for messages."""
        named = (
            (name, list(x) if name == "drop_layers" else x) for name, x in asdict(self).items()
        )
        return ", ".join(f"{name}={value}" for name, value in named if value)

    @property
    def needs_statistics(self) -> bool:
        """Whether units are chosen by their importance."""
        return bool(self.widths) or self.num_layers is not None

    def check(self, config: TransformerConfig) -> None:
        """Check that a model can be pruned to the sizes.

        Raises:
            ConfigError: Naming the size, and what works.
        """
        others = {"mamba": config.mamba, "delta_net": config.delta_net, "layer_pattern":
                  config.layer_pattern, "mtp_num_layers": config.mtp_num_layers,
                  "attention_output_gate": config.attention_output_gate or None}  # fmt: skip
        for name, value in others.items():
            if value is not None:
                raise ConfigError(
                    f"the model has {name}, whose units prune has no rules for. Models with "
                    "attention, dense feed-forward layers and experts alone can be pruned."
                )
        for name, size in self.widths.items():
            self._check_width(name, size, config)
        layers = range(config.num_layers)
        if self.num_layers is not None:
            _check_range("num_layers", self.num_layers, len(layers))
        wrong = sorted(set(self.drop_layers) - set(layers))
        if wrong or len(set(self.drop_layers)) == len(layers):
            raise ConfigError(
                f"drop_layers is {list(self.drop_layers)}, and the model has the layers 0 to "
                f"{len(layers) - 1}. Name some of them, and not all."
            )

    def _check_width(self, name: str, size: int, config: TransformerConfig) -> None:
        moe, names = config.moe, dict(saved_tensors(config))
        if name == "num_moe_experts":
            if moe is None:
                raise ConfigError(f"num_moe_experts is {size}, and the model has no experts.")
            if (moe.router_num_groups or 1) > 1:
                raise ConfigError(
                    f"num_moe_experts is {size}, and the router chooses among "
                    f"{moe.router_num_groups} groups of experts, which prune would mix. Leave "
                    "num_moe_experts out."
                )
            _check_range(name, size, moe.num_experts, least=moe.router_topk)
        elif name == "ffn_hidden_size":
            if not any(key.endswith(".mlp.linear_fc2.weight") for key in names):
                raise ConfigError(
                    f"ffn_hidden_size is {size}, and every layer has experts. Set num_moe_experts."
                )
            _check_range(name, size, config.ffn_size)
        elif name == "hidden_size":
            if moe is not None:
                raise ConfigError(
                    f"hidden_size is {size}, and the model has {moe.num_experts} experts, of whose "
                    "inputs there are no statistics. Leave hidden_size out: num_moe_experts, "
                    "num_attention_heads and num_layers make such a model smaller."
                )
            _check_range(name, size, config.hidden_size)
        else:
            heads, groups = config.num_attention_heads, config.query_groups
            step = 1 if groups == heads else groups
            _check_range(name, size, heads, least=step, step=step)

    def kept_config(self, config: TransformerConfig, layers: Iterable[int]) -> TransformerConfig:
        """Return the configuration of the model with fewer layers and smaller widths.

        Raises:
            ConfigError: If there is no such model, naming the sizes.
        """
        values, kept = flat(config), tuple(layers)
        for name in _BY_LAYER:
            if isinstance(values.get(name), tuple):
                values[name] = tuple(values[name][layer] for layer in kept)
        experts = values.get("moe.layer_freq")
        if isinstance(experts, tuple) and not any(experts):
            of_experts = [n for n, is_one in enumerate(flat(config)["moe.layer_freq"]) if is_one]
            raise ConfigError(
                f"{self.asked} leaves the layers {list(kept)}, of which none has experts. Keep one "
                f"of {of_experts}, by drop_layers."
            )
        try:
            smaller = build_config({**values, "num_layers": len(kept)})
            for name, size in self.widths.items():
                smaller = with_width(smaller, name, size)
        except ConfigError as error:
            raise ConfigError(f"{self.asked} leaves no model: {error}") from error
        return smaller


def with_width(config: TransformerConfig, name: str, size: int) -> TransformerConfig:
    """Return a configuration with another number of units. All other sizes stay."""
    values: dict[str, Any] = flat(config)
    values[_FIELDS[name]] = size
    if name == "num_attention_heads" and config.query_groups == config.num_attention_heads:
        values["num_query_groups"] = size
    return build_config(values)


def _check_range(name: str, size: int, most: int, *, least: int = 1, step: int = 1) -> None:
    if not least <= size <= most or size % step:
        works = f"{least} to {most}" if step == 1 else f"a multiple of {step}, up to {most}"
        reason = " (equal query groups)" if step > 1 else ""
        raise ConfigError(f"{name} is {size}, and the model can be pruned to {works}{reason}.")
