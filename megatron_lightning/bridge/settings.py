"""Configuration rows of a family: fields of ``TransformerConfig`` and keys of config.json.

A row works both ways.

Our side of a row is flat: a nested field is named with a dot (``moe.router_topk``), sizes derived
from other sizes are resolved, and ``moe.layer_freq`` has an entry for each layer. A row refuses, by
name, a key with a value unknown to our side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol, get_args

from megatron_lightning.config import (
    LatentAttentionConfig,
    MoEConfig,
    RopeScaling,
    TransformerConfig,
)
from megatron_lightning.config.by_layer import unrotated_layers, windowed_layers
from megatron_lightning.config.rope_scaling import RopeType

Values = dict[str, Any]
_ABSENT: Any = object()
_GROUPS: Mapping[str, type] = {
    "mla": LatentAttentionConfig,
    "moe": MoEConfig,
    "rope_scaling": RopeScaling,
}

TRAINING = frozenset(
    (
        "hidden_dropout", "attention_dropout", "fp32_residual_connection",
        "attention_softmax_in_fp32", "attention_backend", "logits_in_fp32", "label_smoothing",
        "z_loss", "mtp_loss_scaling_factor", "init_method_std", "init_seed", "moe.router_dtype",
        "moe.router_load_balancing_type", "moe.aux_loss_coeff", "moe.z_loss_coeff",
        "moe.router_bias_update_rate", "moe.input_jitter_eps", "moe.expert_capacity_factor",
        "moe.token_drop_policy", "moe.pad_expert_input_to_capacity", "moe.token_dispatcher_type",
        "moe.grouped_gemm",
    )
)  # fmt: skip
"""Fields of training and computation. A folder describes none of these fields."""


class UnsupportedSettingError(Exception):
    """Keys of config.json with values unknown to ``GPTModel``."""

    def __init__(self, values: Mapping[str, object]) -> None:
        super().__init__(", ".join(f"{key}={value!r}" for key, value in values.items()))


class Settings(Mapping[str, Any]):
    """A folder's configuration, with a record of the keys read by rows."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.seen: set[str] = set()
        """Keys read so far."""

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Row(Protocol):
    """Several fields, and the keys with the same meaning."""

    def read(self, theirs: Settings) -> Values:
        """Return our fields.

        Raises:
            UnsupportedSettingError: If a value cannot be said on our side.
        """

    def write(self, ours: Values) -> Values:
        """Return their keys, made of our fields."""


@dataclass(frozen=True)
class Same(Row):
    """A field and a key with equal values. Without the key, the field keeps the default.

    Args:
        ours: The field.
        theirs: The key.
        none: Their value for None. Leave ``none`` out if their side has no value for None.
    """

    ours: str
    theirs: str
    none: Any = _ABSENT

    def read(self, theirs: Settings) -> Values:
        """Return the field."""
        value = theirs.get(self.theirs)
        if self.none is not _ABSENT and value == self.none:
            return {self.ours: None}
        return {} if value is None else {self.ours: value}

    def write(self, ours: Values) -> Values:
        """Return the key."""
        value = ours.get(self.ours)
        if value is not None:
            return {self.theirs: value}
        is_said = self.none is not _ABSENT and self.ours in ours
        return {self.theirs: self.none} if is_said else {}


@dataclass(frozen=True)
class Choice(Row):
    """A field and a key with other words for the same.

    Args:
        ours: The field.
        theirs: The key.
        words: Our word -> theirs. All other words are refused.
    """

    ours: str
    theirs: str
    words: Mapping[Any, Any]

    def read(self, theirs: Settings) -> Values:
        """Return the field."""
        value = theirs.get(self.theirs)
        for word, other in self.words.items():
            if other == value:
                return {self.ours: word}
        raise UnsupportedSettingError({self.theirs: value})

    def write(self, ours: Values) -> Values:
        """Return the key."""
        word = ours.get(self.ours)
        return {self.theirs: self.words[word]} if word in self.words else {}


@dataclass(frozen=True)
class Constant(Row):
    """A field with a constant value in the family, and the corresponding keys."""

    ours: str
    value: Any
    theirs: Mapping[str, Any] = field(default_factory=dict)

    def read(self, theirs: Settings) -> Values:
        """Return the field. Other values of the keys are refused."""
        for key, expected in self.theirs.items():
            if theirs.get(key) != expected:
                raise UnsupportedSettingError({key: theirs.get(key)})
        return {self.ours: self.value}

    def write(self, ours: Values) -> Values:
        """Return the keys."""
        return dict(self.theirs)


@dataclass(frozen=True)
class Biases(Row):
    """Biases of all linear layers, switched together by several keys."""

    keys: tuple[str, ...]

    def read(self, theirs: Settings) -> Values:
        """Return the field."""
        values = {key: bool(theirs.get(key)) for key in self.keys}
        if len(set(values.values())) > 1:
            raise UnsupportedSettingError(values)
        return {"add_bias_linear": any(values.values())}

    def write(self, ours: Values) -> Values:
        """Return the keys."""
        return dict.fromkeys(self.keys, ours["add_bias_linear"])


@dataclass(frozen=True)
class KeyForEveryHead(Row):
    """Every query head has a separate key and value."""

    def read(self, theirs: Settings) -> Values:
        """Return the field. Shared keys are refused."""
        groups = theirs.get("num_key_value_heads")
        if groups not in (None, theirs["num_attention_heads"]):
            heads = theirs["num_attention_heads"]
            raise UnsupportedSettingError(
                {"num_key_value_heads": groups, "num_attention_heads": heads}
            )
        return {"num_query_groups": None}

    def write(self, ours: Values) -> Values:
        """Return the key."""
        return {"num_key_value_heads": ours["num_attention_heads"]}


@dataclass(frozen=True)
class Dropouts(Row):
    """Dropout of the embedding's and the blocks' outputs, set by several keys."""

    keys: tuple[str, ...]

    def read(self, theirs: Settings) -> Values:
        """Return the field. Different values are refused."""
        values = {key: theirs.get(key) for key in self.keys}
        if len(set(values.values())) > 1:
            raise UnsupportedSettingError(values)
        return {"hidden_dropout": next(iter(values.values()))}

    def write(self, ours: Values) -> Values:
        """Return the keys."""
        return dict.fromkeys(self.keys, ours["hidden_dropout"])


@dataclass(frozen=True)
class RootOfWidth(Row):
    """Word embeddings times the root of the hidden size."""

    def read(self, theirs: Settings) -> Values:
        """Return the field."""
        return {"embedding_multiplier": float(theirs["hidden_size"]) ** 0.5}

    def write(self, ours: Values) -> Values:
        """Return no key: the class multiplies by no other number."""
        return {}


@dataclass(frozen=True)
class Window(Row):
    """Sliding windows. Theirs count the query's own position."""

    switch: str | None = None
    """Key of the switch for the window. None: the window's own key is the switch."""
    by_layer: bool = False
    """Whether ``layer_types`` names the layers with a window."""

    def read(self, theirs: Settings) -> Values:
        """Return the fields. Layers of other types, and layers without a size, are refused."""
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
        """Return the keys."""
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
class Rope(Row):
    """Base and scaling of rotary frequencies (``rope_parameters`` of transformers 5)."""

    by_window: bool = False
    """Whether layers with a window have a separate base."""
    partial: bool = False
    """Whether the family rotates a part of a head."""
    original: str | None = None
    """Key of the longest sequence of the pretraining, if the family has a separate key."""

    def read(self, theirs: Settings) -> Values:
        """Return the fields. Rules of scaling other than ``RopeScaling``'s are refused."""
        rope = dict(theirs.get("rope_parameters") or {})
        if self.by_window:
            local = rope["sliding_attention"]
            if local.get("rope_type", "default") != "default":
                raise UnsupportedSettingError({"rope_parameters.sliding_attention": local})
            base = {"window_rotary_base": float(local["rope_theta"])}
            is_used = "sliding_attention" in (theirs.get("layer_types") or ())
            return self._read(rope["full_attention"], theirs) | (base if is_used else {})
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
        ours |= {"rope_scaling.rope_type": kind, "rope_scaling.factor": float(rope["factor"])}
        if kind == "linear":
            return ours
        names = ["original_max_position_embeddings"]
        names += ["low_freq_factor", "high_freq_factor"] if kind == "llama3" else []
        ours |= {f"rope_scaling.{name}": rope[name] for name in names}
        return ours | (_yarn_ours(rope, "kv_lora_rank" in theirs) if kind == "yarn" else {})

    def write(self, ours: Values) -> Values:
        """Return the keys."""
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
        length = rope.get("original_max_position_embeddings")
        key = {} if self.original is None or length is None else {self.original: length}
        if self.by_window:
            base = ours["window_rotary_base"] or ours["rotary_base"]
            local = {"rope_theta": base, "rope_type": "default"}
            rope = {"full_attention": rope, "sliding_attention": local}
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


# ---------------------------------------------------------------------------------------- our side


def flat(config: TransformerConfig) -> Values:
    """Return the fields of a configuration, flat and resolved."""
    values = {entry.name: getattr(config, entry.name) for entry in fields(config)}
    for name in _GROUPS:
        group = values.pop(name)
        values |= {} if group is None else {f"{name}.{k}": v for k, v in asdict(group).items()}
    values["num_query_groups"] = config.query_groups
    values["ffn_hidden_size"] = config.ffn_size
    if config.mla is None:
        values["kv_channels"] = config.head_dim
        values["softmax_scale"] = config.softmax_scale or config.head_dim**-0.5
    windowed, unrotated = windowed_layers(config), unrotated_layers(config)
    values["window_size"] = config.window_size if any(windowed) else None
    is_mixed = len(set(windowed)) > 1
    values["window_attn_skip_freq"] = tuple(map(int, windowed)) if is_mixed else None
    values["no_rope_freq"] = tuple(map(int, unrotated)) if any(unrotated) else None
    if config.rope_scaling is None and config.window_rotary_base == config.rotary_base:
        values["window_rotary_base"] = None
    kinds = config.layer_kinds
    if set(kinds) <= {"dense", "expert"}:
        values["layer_pattern"] = None
    if config.moe is not None:
        values["moe.ffn_hidden_size"] = config.expert_ffn_size
        values["moe.layer_freq"] = tuple(int(kind == "expert") for kind in kinds)
    return values


def build_config(values: Mapping[str, Any]) -> TransformerConfig:
    """Return the configuration of flat fields. Missing fields have their defaults."""
    top: Values = {}
    for name, value in values.items():
        group, _, inner = name.rpartition(".")
        (top.setdefault(group, {}) if group else top)[inner] = value
    experts = top.get("moe")
    if experts is not None and set(experts.get("layer_freq", (1,))) == {1}:
        experts["layer_freq"] = 1
    return TransformerConfig(**top)


def differing(first: Values, second: Values) -> list[str]:
    """Return the different fields, except for training fields."""
    names = [name for name in {**first, **second} if name not in TRAINING]
    return [name for name in names if not _equal(first.get(name), second.get(name))]


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, float) and isinstance(second, (int, float)):
        return math.isclose(first, second, rel_tol=1e-9)
    return bool(first == second)
