"""Configuration rows of models with linear attention in some layers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lightning.bridge.family_rules.settings import (
    Row,
    Settings,
    UnsupportedSettingError,
    Values,
)

_KINDS = ("full_attention", "linear_attention")


@dataclass(frozen=True)
class LinearLayers(Row):
    """Layers with gated delta net in place of attention (``layer_types``)."""

    def read(self, theirs: Settings) -> Values:
        """Return the field of ``TransformerConfig``. Other types, and models without such layers,
        are refused.
        """
        kinds = list(theirs["layer_types"])
        if "linear_attention" not in kinds or set(kinds) - set(_KINDS):
            raise UnsupportedSettingError({"layer_types": kinds})
        return {"linear_attention_freq": tuple(_KINDS.index(kind) for kind in kinds)}

    def write(self, ours: Values) -> Values:
        """Return the key."""
        linear = ours["linear_attention_freq"] or (0,) * ours["num_layers"]
        return {"layer_types": [_KINDS[entry] for entry in linear]}
