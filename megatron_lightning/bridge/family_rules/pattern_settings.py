"""Configuration rows of hybrid models: patterns of layers, and step sizes of Mamba-2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_lightning.bridge.family_rules.settings import (
    Row,
    Settings,
    UnsupportedSettingError,
    Values,
)
from megatron_lightning.config.hybrid_pattern import parse_hybrid_pattern

_TYPES: Mapping[str, str] = MappingProxyType(
    {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
)
"""Letter -> their type of layer."""


@dataclass(frozen=True, init=False)
class WithoutEffect(Row):
    """Keys without an effect on parameters or logits in a family."""

    keys: tuple[str, ...]

    def __init__(self, *keys: str) -> None:
        object.__setattr__(self, "keys", keys)

    def read(self, theirs: Settings) -> Values:
        """Return no field."""
        for key in self.keys:
            theirs.get(key)
        return {}

    def write(self, ours: Values) -> Values:
        """Return no key."""
        return {}


@dataclass(frozen=True)
class LayerTypes(Row):
    """The pattern of Nemotron-H, a list of types (``layers_block_type``), and the options of
    experts, which every folder has.
    """

    experts: tuple[Row, ...]
    """Rows of options of experts. Read if a layer has experts."""

    def read(self, theirs: Settings) -> Values:
        """Return the fields of ``TransformerConfig``."""
        letters = {kind: letter for letter, kind in _TYPES.items()}
        types = theirs["layers_block_type"]
        unknown = [kind for kind in types if kind not in letters]
        if unknown:
            raise UnsupportedSettingError({"layers_block_type": unknown[0]})
        ours: Values = {"layer_pattern": "".join(letters[kind] for kind in types)}
        for row in self.experts:
            values = row.read(theirs)  # keys without experts have no effect
            if "E" in ours["layer_pattern"]:
                ours |= values
        return ours

    def write(self, ours: Values) -> Values:
        """Return the keys of config.json."""
        pattern = parse_hybrid_pattern(ours["layer_pattern"])
        keys: Values = {"layers_block_type": [_TYPES[letter] for letter in pattern.letters]}
        if "E" in pattern.letters:
            for row in self.experts:
                keys |= row.write(ours)
        return keys


@dataclass(frozen=True)
class AllMamba(Row):
    """Mamba-2 in every layer."""

    def read(self, theirs: Settings) -> Values:
        """Return the fields of ``TransformerConfig``. The channels of all heads are given twice."""
        theirs.get("expand")
        return {"layer_pattern": "M" * theirs["num_hidden_layers"]}

    def write(self, ours: Values) -> Values:
        """Return the keys of config.json."""
        inner = ours["mamba.num_heads"] * ours["mamba.head_dim"]
        pattern = parse_hybrid_pattern(ours["layer_pattern"])
        layers = pattern.letters if set(pattern.letters) == {"M"} else ""
        return {"num_hidden_layers": len(layers), "expand": inner // ours["hidden_size"]}


@dataclass(frozen=True)
class StepLimit(Row):
    """Limits of the step sizes of Mamba-2: both, or the smallest step."""

    key: str

    def read(self, theirs: Settings) -> Values:
        """Return the field of ``TransformerConfig``."""
        value = theirs[self.key]
        limits = tuple(value) if isinstance(value, list | tuple) else (value, math.inf)
        return {"mamba.dt_limit": limits}

    def write(self, ours: Values) -> Values:
        """Return the key."""
        low, high = ours["mamba.dt_limit"]
        return {self.key: [low, high] if self.key == "time_step_limit" else low}
