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
from typing import Any, Protocol

from megatron_lightning.config import (
    DeltaNetConfig,
    LatentAttentionConfig,
    MambaConfig,
    MoEConfig,
    RopeScaling,
    TransformerConfig,
)
from megatron_lightning.config.by_layer import unrotated_layers, windowed_layers
from megatron_lightning.config.delta_net import linear_layers
from megatron_lightning.config.hybrid_pattern import DEPTH, HybridPattern
from megatron_lightning.config.layer_kinds import GROUPS

Values = dict[str, Any]
_ABSENT: Any = object()
_GROUPS: Mapping[str, type] = {
    "delta_net": DeltaNetConfig,
    "mla": LatentAttentionConfig,
    "mamba": MambaConfig,
    "moe": MoEConfig,
    "rope_scaling": RopeScaling,
}

TRAINING = frozenset(
    (
        "hidden_dropout", "embedding_dropout", "attention_dropout", "fp32_residual_connection",
        "attention_softmax_in_fp32", "attention_backend", "logits_in_fp32", "label_smoothing",
        "z_loss", "mtp_loss_scaling_factor", "init_method_std", "init_seed", "moe.router_dtype",
        "moe.router_load_balancing_type", "moe.aux_loss_coeff", "moe.z_loss_coeff",
        "moe.router_bias_update_rate", "moe.input_jitter_eps", "moe.expert_capacity_factor",
        "moe.token_drop_policy", "moe.pad_expert_input_to_capacity", "moe.token_dispatcher_type",
        "moe.grouped_gemm", "mamba.chunk_size", "mamba.recompute_scan",
        "delta_net.chunk_size", "delta_net.kernel", "delta_net.recompute_scan",
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
        theirs: The key. Empty: named as the field.
        none: Their value for None. Leave ``none`` out if their side has no value for None.
    """

    ours: str
    theirs: str = ""
    none: Any = _ABSENT

    @property
    def key(self) -> str:
        """The key."""
        return self.theirs or self.ours

    def read(self, theirs: Settings) -> Values:
        """Return the field of ``TransformerConfig``."""
        value = theirs.get(self.key)
        if self.none is not _ABSENT and value == self.none:
            return {self.ours: None}
        return {} if value is None else {self.ours: value}

    def write(self, ours: Values) -> Values:
        """Return the key."""
        value = ours.get(self.ours)
        if value is not None:
            return {self.key: value}
        is_said = self.none is not _ABSENT and self.ours in ours
        return {self.key: self.none} if is_said else {}


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
        """Return the field of ``TransformerConfig``."""
        value = theirs.get(self.theirs)
        for word, our_value in self.words.items():
            if our_value == value:
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
        """Return the field of ``TransformerConfig``. Other values of the keys are refused."""
        for key, expected_value in self.theirs.items():
            if theirs.get(key) != expected_value:
                raise UnsupportedSettingError({key: theirs.get(key)})
        return {self.ours: self.value}

    def write(self, ours: Values) -> Values:
        """Return the keys of config.json."""
        return dict(self.theirs)


@dataclass(frozen=True)
class Biases(Row):
    """Biases of all linear layers, switched together by several keys."""

    keys: tuple[str, ...]

    def read(self, theirs: Settings) -> Values:
        """Return the field of ``TransformerConfig``."""
        values = {key: bool(theirs.get(key)) for key in self.keys}
        if len(set(values.values())) > 1:
            raise UnsupportedSettingError(values)
        return {"add_bias_linear": any(values.values())}

    def write(self, ours: Values) -> Values:
        """Return the keys of config.json."""
        return dict.fromkeys(self.keys, ours["add_bias_linear"])


@dataclass(frozen=True)
class KeyForEveryHead(Row):
    """Every query head has a separate key and value."""

    def read(self, theirs: Settings) -> Values:
        """Return the field of ``TransformerConfig``. Shared keys are refused."""
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
class RootOfWidth(Row):
    """Word embeddings times the root of the hidden size."""

    def read(self, theirs: Settings) -> Values:
        """Return the field of ``TransformerConfig``."""
        return {"embedding_multiplier": float(theirs["hidden_size"]) ** 0.5}

    def write(self, ours: Values) -> Values:
        """Return no key: the class multiplies by no other number."""
        return {}


@dataclass(frozen=True)
class InverseRoot(Row):
    """A field with the inverse root of a key, an integer."""

    ours: str
    theirs: str

    def read(self, theirs: Settings) -> Values:
        """Return the field of ``TransformerConfig``."""
        return {self.ours: float(theirs[self.theirs]) ** -0.5}

    def write(self, ours: Values) -> Values:
        """Return the nearest integer."""
        return {self.theirs: round(ours[self.ours] ** -2)}


# ---------------------------------------------------------------------------------------- our side


def flat(config: TransformerConfig) -> Values:
    """Return the fields of a configuration, flat and resolved."""
    values = {entry.name: getattr(config, entry.name) for entry in fields(config)}
    for name in _GROUPS:
        group = values.pop(name)
        values |= {} if group is None else {f"{name}.{k}": v for k, v in asdict(group).items()}
    # Values that are None by default are resolved, so that equal models have equal fields.
    values["num_query_groups"] = config.query_groups
    values["ffn_hidden_size"] = config.ffn_size
    values["embedding_dropout"] = config.embedding_dropout_p
    if config.mla is None:
        values["kv_channels"] = config.head_dim
        values["softmax_scale"] = config.softmax_scale or config.head_dim**-0.5
    windowed, unrotated = windowed_layers(config), unrotated_layers(config)
    values["window_size"] = config.window_size if any(windowed) else None
    is_mixed = len(set(windowed)) > 1
    values["window_attn_skip_freq"] = tuple(map(int, windowed)) if is_mixed else None
    linear = linear_layers(config.linear_attention_freq, config.num_layers)
    values["linear_attention_freq"] = tuple(map(int, linear)) if any(linear) else None
    values["no_rope_freq"] = tuple(map(int, unrotated)) if any(unrotated) else None
    if config.rope_scaling is None and config.window_rotary_base == config.rotary_base:
        values["window_rotary_base"] = None
    kinds = config.layer_kinds
    if set(kinds) <= {"dense", "expert"}:
        values["layer_pattern"] = None
    if config.mamba is not None:
        values["mamba.num_heads"] = config.mamba.sizes(config.hidden_size).heads
        del values["mamba.expand"]  # follows from the heads
    if config.moe is not None:
        values["moe.ffn_hidden_size"] = config.expert_ffn_size
        values["moe.router_group_best"] = config.moe.group_best
        values["moe.layer_freq"] = tuple(int(kind in GROUPS["moe"]) for kind in kinds)
    if config.hybrid is not None:
        _flatten_pattern(values, config.hybrid)
    return values


_OF_ATTENTION = (
    "num_attention_heads", "num_query_groups", "kv_channels", "softmax_scale", "attention_dropout",
)  # fmt: skip


def _flatten_pattern(values: Values, pattern: HybridPattern) -> None:
    """Set the pattern without ends of stages, and remove options of kinds of layers missing in the
    pattern.
    """
    mtp = (DEPTH + (pattern.mtp or "")) * pattern.depths
    values["layer_pattern"] = pattern.letters + mtp
    values.pop("moe.layer_freq", None)  # follows from the pattern
    present = {*pattern.kinds, *pattern.depth_kinds}
    for kinds, names in (
        ({"attention"}, _OF_ATTENTION),
        ({"mlp"}, ("ffn_hidden_size",)),
        ({"mlp", "moe"}, ("activation",)),
    ):
        if present.isdisjoint(kinds):
            for name in names:
                values.pop(name, None)


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
