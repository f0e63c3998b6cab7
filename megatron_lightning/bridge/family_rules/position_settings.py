"""Configuration rows of visible positions: sliding windows and rotary frequencies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from megatron_lightning.bridge.family_rules.settings import (
    Row,
    Settings,
    UnsupportedSettingError,
    Values,
)
from megatron_lightning.config.rope_scaling import RopeType

_LONGROPE = ("short_factor", "long_factor")


@dataclass(frozen=True)
class Window(Row):
    """Sliding windows. Theirs count the query's own position."""

    switch: str | None = None
    """Key of the switch for the window. None: the window's own key is the switch."""
    by_layer: bool = False
    """Whether ``layer_types`` names the layers with a window."""

    def read(self, theirs: Settings) -> Values:
        """Return the fields of ``TransformerConfig``. Layers of other types, and layers without a
        size, are refused.
        """
        size, kinds = theirs.get("sliding_window"), list(theirs.get("layer_types") or ())
        if self.switch is not None:
            theirs.get("max_window_layers")
            size = size if theirs.get(self.switch) else None
        windowed = [kind == "sliding_attention" for kind in kinds] or [bool(size)]
        if set(kinds) - {"sliding_attention", "full_attention"} or (any(windowed) and not size):
            raise UnsupportedSettingError({"layer_types": theirs["layer_types"]})
        if not any(windowed):
            return {"window_size": None}
        flags = {} if all(windowed) else {"window_attn_skip_freq": tuple(map(int, windowed))}
        return {"window_size": (int(size or 0) - 1, 0), **flags}

    def write(self, ours: Values) -> Values:
        """Return the keys of config.json."""
        window, frequency = ours["window_size"], ours["window_attn_skip_freq"]
        keys: Values = {"sliding_window": None if window is None else window[0] + 1}
        if self.switch is not None:
            keys |= {self.switch: window is not None, "max_window_layers": 0}
        if self.by_layer:
            windowed = frequency or (int(window is not None),) * ours["num_layers"]
            names = ("full_attention", "sliding_attention")
            keys["layer_types"] = [names[entry] for entry in windowed]
        return keys


@dataclass(frozen=True)
class RotatedLayers(Row):
    """Layers with rotary positions, with 1 in ``no_rope_layers``."""

    def read(self, theirs: Settings) -> Values:
        """Return the field of ``TransformerConfig``."""
        theirs.get("no_rope_layer_interval")
        rotated = theirs["no_rope_layers"]
        if all(rotated):
            return {}
        return {"no_rope_freq": tuple(int(not entry) for entry in rotated)}

    def write(self, ours: Values) -> Values:
        """Return the key."""
        unrotated = ours["no_rope_freq"] or (0,) * ours["num_layers"]
        return {"no_rope_layers": [1 - entry for entry in unrotated]}


@dataclass(frozen=True)
class RotatedWindows(Row):
    """Rotary positions only in layers with a window, if there is a window."""

    def read(self, theirs: Settings) -> Values:
        """Return the field of ``TransformerConfig``."""
        theirs.get("sliding_window_pattern")
        kinds = theirs["layer_types"]
        if theirs.get("sliding_window") is None or "full_attention" not in kinds:
            return {}
        return {"no_rope_freq": tuple(int(kind == "full_attention") for kind in kinds)}

    def write(self, ours: Values) -> Values:
        """Return no key: layers with a window say the same."""
        return {}


@dataclass(frozen=True)
class Rope(Row):
    """Base and scaling of rotary frequencies (``rope_parameters`` of transformers 5)."""

    by_window: bool = False
    """Whether layers with a window have a separate base."""
    partial: bool = False
    """Whether the family rotates a part of a head."""
    original: str | None = None
    """Key of the longest sequence of the pretraining, if the family has a separate key."""

    def read(self, theirs: Settings) -> Values:
        """Return the fields of ``TransformerConfig``. Rules of scaling other than ``RopeScaling``'s
        are refused.
        """
        rope = dict(theirs.get("rope_parameters") or {})
        if self.by_window:
            local_rope, full_rope = rope["sliding_attention"], rope["full_attention"]
            if local_rope.get("rope_type", "default") != "default":
                raise UnsupportedSettingError({"rope_parameters.sliding_attention": local_rope})
            if full_rope.get("truncate") is False:  # transformers looks for the key elsewhere
                raise UnsupportedSettingError({"rope_parameters.full_attention": full_rope})
            base = {"window_rotary_base": float(local_rope["rope_theta"])}
            is_used = "sliding_attention" in (theirs.get("layer_types") or ())
            return self._read(full_rope, theirs) | (base if is_used else {})
        return self._read(rope, theirs)

    def _read(self, rope: Values, theirs: Settings) -> Values:
        if self.original is not None:
            theirs.get(self.original)
        ours: Values = {"rotary_base": float(rope["rope_theta"])}
        if self.partial:
            ours["rotary_percent"] = rope.get("partial_rotary_factor", 1.0)
        kind = rope.get("rope_type", "default")
        if kind == "default":
            return ours
        if kind not in get_args(RopeType):
            raise UnsupportedSettingError({"rope_parameters.rope_type": kind})
        if kind == "longrope":
            return ours | _longrope_ours(rope, theirs)
        ours |= {"rope_scaling.rope_type": kind, "rope_scaling.factor": float(rope["factor"])}
        if kind == "linear":
            return ours
        names = ["original_max_position_embeddings"]
        names += ["low_freq_factor", "high_freq_factor"] if kind == "llama3" else []
        ours |= {f"rope_scaling.{name}": rope[name] for name in names}
        return ours | (_yarn_ours(rope, "kv_lora_rank" in theirs) if kind == "yarn" else {})

    def write(self, ours: Values) -> Values:
        """Return the keys of config.json."""
        rope: Values = {"rope_theta": ours["rotary_base"], "rope_type": "default"}
        if self.partial:
            rope["partial_rotary_factor"] = ours["rotary_percent"]
        if "rope_scaling.rope_type" in ours:
            scaling = {
                name.removeprefix("rope_scaling."): value
                for name, value in ours.items()
                if name.startswith("rope_scaling.")
            }
            kind = scaling["rope_type"]
            names = ["rope_type", "factor"]
            names += [] if kind == "linear" else ["original_max_position_embeddings"]
            names += ["low_freq_factor", "high_freq_factor"] if kind == "llama3" else []
            rope |= {name: scaling[name] for name in names}
            rope |= _yarn_theirs(scaling) if kind == "yarn" else {}
            rope |= _longrope_theirs(scaling) if kind == "longrope" else {}
        length = rope.get("original_max_position_embeddings")
        key = {} if self.original is None or length is None else {self.original: length}
        if self.by_window:
            base = ours["window_rotary_base"] or ours["rotary_base"]
            local_rope = {"rope_theta": base, "rope_type": "default"}
            rope = {"full_attention": rope, "sliding_attention": local_rope}
        return {"rope_parameters": rope, **key}


def _yarn_ours(rope: Values, is_latent: bool) -> Values:
    """Return the fields of YaRN only."""
    log = 0.1 * math.log(rope["factor"])
    mscale, all_dim = rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0
    sharpness = rope.get("attention_factor")
    if sharpness is not None:  # of cosines and sines: (mscale log + 1) / (all_dim log + 1)
        all_dim = all_dim if is_latent else 0.0
        mscale = (sharpness * (all_dim * log + 1.0) - 1.0) / log if log else 1.0
    elif not (mscale and all_dim):  # transformers looks at both or none
        if is_latent and all_dim:
            raise UnsupportedSettingError({"rope_parameters.mscale_all_dim": all_dim})
        mscale, all_dim = 1.0, 0.0
    return {
        "rope_scaling.mscale": mscale,
        "rope_scaling.mscale_all_dim": all_dim,
        "rope_scaling.beta_fast": float(rope.get("beta_fast") or 32.0),
        "rope_scaling.beta_slow": float(rope.get("beta_slow") or 1.0),
        "rope_scaling.correction_range_round_to_int": rope.get("truncate", True),
    }


def _yarn_theirs(scaling: Values) -> Values:
    """Return the keys of YaRN only."""
    mscale, all_dim = scaling["mscale"], scaling["mscale_all_dim"]
    keys = {"beta_fast": scaling["beta_fast"], "beta_slow": scaling["beta_slow"]}
    keys["truncate"] = scaling["correction_range_round_to_int"]
    if mscale and all_dim:
        keys |= {"mscale": mscale, "mscale_all_dim": all_dim}
    elif (mscale, all_dim) != (1.0, 0.0):
        log = 0.1 * math.log(scaling["factor"])
        keys["attention_factor"] = (mscale * log + 1.0) / (all_dim * log + 1.0)
        keys |= {"mscale_all_dim": all_dim} if all_dim else {}
    return keys


def _longrope_ours(rope: Values, theirs: Settings) -> Values:
    """Return the fields of LongRoPE."""
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or theirs["max_position_embeddings"] / original
    ours: Values = {
        "rope_type": "longrope",
        "factor": max(1.0, float(factor)),
        "original_max_position_embeddings": original,
        **{name: tuple(map(float, rope[name])) for name in _LONGROPE},
    }
    if rope.get("attention_factor") is not None:
        ours["attention_factor"] = float(rope["attention_factor"])
    return {f"rope_scaling.{name}": value for name, value in ours.items()}


def _longrope_theirs(scaling: Values) -> Values:
    """Return the keys of LongRoPE only."""
    keys: Values = {name: list(scaling[name]) for name in _LONGROPE}
    if scaling["attention_factor"] is not None:
        keys["attention_factor"] = scaling["attention_factor"]
    return keys
