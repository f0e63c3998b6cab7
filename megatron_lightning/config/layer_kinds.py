"""Kinds of layers: ours by name, a user's by class path. No torch here.

Three read-only mappings have a kind as key: ``models.transformer_layers.LAYERS`` builds a layer,
``models.blueprint.LAYER_WEIGHTS`` names the layer's weights, ``planning.activations.LEDGERS`` lists
the memory kept by the layer's operations. A user's kind is the class path of a class with three
static methods:

    build(config, rotary) -> nn.Module       its forward(hidden [s, b, h], sequence) -> [s, b, h]
    weights(config) -> tuple[Weight, ...]    in registration order
    ledger(sizes, path, stream) -> list[Operation]
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from megatron_lightning.errors import ConfigError

if TYPE_CHECKING:
    from megatron_lightning.config.transformer import TransformerConfig

SINGLE_MIXER_KINDS = ("attention", "mlp", "moe", "mamba", "delta_net")
"""Layers with a single mixer, added once to the residual stream."""
LAYER_KINDS = ("dense", "expert", *SINGLE_MIXER_KINDS)
"""Attention with a feed-forward or experts behind it, and layers with a single mixer."""
WITHOUT_ATTENTION = frozenset(("mlp", "moe", "mamba", "delta_net"))
"""Kinds without queries and keys."""
WITHOUT_FEED_FORWARD = frozenset(("attention", "mamba", "delta_net"))
"""Kinds without a feed-forward or experts."""
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"moe": ("expert", "moe"), "mamba": ("mamba",)}
)
"""Group of options -> kinds of layers that the group describes."""
_NAMES: Mapping[str, str] = {"moe": "experts", "mamba": "mixers of Mamba-2"}
_METHODS = ("build", "weights", "ledger")
_T = TypeVar("_T")


def entry_of(kind: str, entries: Mapping[str, _T], method: str) -> _T:
    """Return the entry of a kind in any of the three mappings.

    Args:
        kind: A key, or the class path of a user's kind.
        entries: The mapping.
        method: Method of a user's class in place of an entry.
    """
    return entries[kind] if kind in entries else cast("_T", getattr(_load(kind), method))


def check_layer_kinds(config: TransformerConfig) -> None:
    """Check the kinds of a config's layers.

    Raises:
        ConfigError: If a kind is unknown, the number of kinds differs from the number of layers, or
            the group of options of a kind is missing or described no layer.
    """
    pattern, moe = config.layer_pattern, config.moe
    if pattern is None:
        if moe is not None:
            moe.layer_kinds(config.num_layers)
        if config.mamba is not None:
            raise ConfigError(
                "mamba is set, and without layer_pattern no layer is of the kind mamba. Set "
                "layer_pattern, such as M-M*-, or leave mamba out."
            )
        return
    pattern_text = repr(pattern) if isinstance(pattern, str) else str(list(pattern))
    if moe is not None and moe.layer_freq != 1:
        raise ConfigError(
            f"layer_pattern is {pattern_text} and moe.layer_freq is {moe.layer_freq}; both say "
            "which layers have experts. Leave one of them out."
        )
    if not isinstance(pattern, str):
        check_pattern(pattern, config.num_layers)
    present = {*config.layer_kinds, *(config.depth_kinds if config.mtp_num_layers else ())}
    for group, kinds in GROUPS.items():
        is_set = getattr(config, group) is not None
        if is_set is present.isdisjoint(kinds):
            fault = f"{group} describes" if is_set else f"no {group} describes"
            raise ConfigError(
                f"layer_pattern is {pattern_text}, and {fault} {_NAMES[group]}. Set {group} "
                f"together with layers of the kind {' or '.join(kinds)}."
            )
    single = present.intersection(SINGLE_MIXER_KINDS)
    if single and config.norm_placement != "pre":
        raise ConfigError(
            f"norm_placement is {config.norm_placement}, and layers of the kind {min(single)} have "
            "a norm before the single mixer alone. Set norm_placement to pre."
        )
    if config.mamba is not None:
        config.mamba.sizes(config.hidden_size)


def check_pattern(pattern: Sequence[str], num_layers: int) -> None:
    """Check ``TransformerConfig.layer_pattern``.

    Raises:
        ConfigError: If the number of kinds differs from the number of layers, or a kind is unknown.
    """
    if len(pattern) != num_layers:
        raise ConfigError(
            f"layer_pattern has {len(pattern)} entries, and num_layers is {num_layers}. Set one "
            "kind for each layer."
        )
    for kind in dict.fromkeys(pattern):
        if kind not in LAYER_KINDS:
            _load(kind)


def _load(kind: str) -> Any:
    module, _, name = kind.rpartition(".")
    try:
        layer = getattr(importlib.import_module(module), name) if module else None
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"layer_pattern names {kind!r}, which cannot be imported ({error}). Set the class path "
            "of a kind of layer."
        ) from error
    missing_methods = [method for method in _METHODS if not callable(getattr(layer, method, None))]
    if missing_methods:
        raise ConfigError(
            f"layer_pattern names {kind!r}, which is neither {' nor '.join(LAYER_KINDS)} nor the "
            f"class path of a class with the static methods {', '.join(_METHODS)} (missing: "
            f"{', '.join(missing_methods)}). Set one of these."
        )
    return layer
