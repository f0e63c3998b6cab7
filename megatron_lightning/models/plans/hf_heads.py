"""Attention heads of ``transformers`` models under tensor parallelism.

Attention modules of ``transformers`` mostly derive head counts from the projections' outputs
(``view(..., -1, head_dim)``) and repeat keys and values ``num_key_value_groups`` times. Some
modules read counts from attributes. No head may be split. If ranks outnumber the key and value
heads, several ranks share a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.styles import ColumnParallel, KeyOrValue, local_heads_per_group
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.shards.attachments import base_layer
from megatron_lightning.parallel.shards.sharding import Style

_QUERIES = ("q_proj", "q_b_proj", "query_key_value", "qkv_proj", "kv_b_proj")
"""Projections whose output has every query head, with or without fused key and value."""
_KEYS, _VALUES = ("k_proj",), ("v_proj",)
_COUNTS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "num_key_value_heads",
    "num_kv_heads",
)
"""Attribute names of head counts in attention modules."""


class Attention:
    """An attention module and the sizes named by the module or the configuration.

    Args:
        path: Path of the module.
        module: The module.
        model: The model with the module.
    """

    def __init__(self, path: str, module: nn.Module, model: nn.Module) -> None:
        full_config: Any = model.config
        self.path = path
        self.module = module
        self._configs = (getattr(module, "config", None), full_config.get_text_config())

    def value(self, *names: str) -> int | None:
        """Return the first positive number under ``names`` in the module or a configuration."""
        for owner in (self.module, *self._configs):
            for name in names:
                number = _read(owner, name)
                if isinstance(number, int) and number > 0:
                    return number
        return None

    @property
    def heads(self) -> int | None:
        """Query heads."""
        return self.value("num_heads", "num_attention_heads", "n_heads", "n_head")

    def key_value_heads(self, linear: nn.Linear, *dims: str) -> int | None:
        """Return the heads in the output of a projection to keys or values."""
        width = self.value(*dims, "head_dim")
        if width is not None and isinstance(getattr(self.module, "head_dim", None), int):
            heads, remainder = divmod(linear.out_features, width)
            if remainder == 0:
                return heads
        return self.value("num_key_value_heads", "num_kv_heads") or self.heads

    @property
    def groups(self) -> int | None:
        """Number of query heads that share a key. None: the module does not say."""
        groups = getattr(self.module, "num_key_value_groups", None)
        return groups if isinstance(groups, int) else None

    @property
    def counts(self) -> set[int]:
        """Numbers of heads, of queries and of keys."""
        keys = self.value("num_key_value_heads", "num_kv_heads")
        return {count for count in (self.heads, keys) if count is not None}

    def splits_heads(self, rows: Mapping[str, Style]) -> bool:
        """Return whether ``rows`` split the output of the projections by heads."""
        return any(
            isinstance(row := rows.get(f"{self.path}.{name}"), ColumnParallel | KeyOrValue)
            and not getattr(row, "gather_output", False)
            for name in (*_QUERIES, *_KEYS)
        )


def _read(owner: object, name: str) -> object:
    try:
        return getattr(owner, name, None)
    except Exception:  # configurations with different layers refuse a single value
        return None


def projection(path: str, linear: nn.Linear, attention: Attention, tensor_size: int) -> Style:
    """Return the style of a column-parallel layer with or without heads in the output.

    Raises:
        ConfigError: If heads would be split, or cannot be shared.
    """
    own_name = path.rpartition(".")[2]
    if own_name in _QUERIES:
        heads = attention.heads
        if heads is not None and linear.out_features % heads == 0:
            _check_divides(path, heads, "query heads", tensor_size)
            return ColumnParallel(num_heads=heads)
    if own_name in (*_KEYS, *_VALUES):
        dims = ("v_head_dim",) if own_name in _VALUES else ()
        heads = attention.key_value_heads(linear, *dims)
        if heads is not None and linear.out_features % heads == 0:
            return _key_or_value(path, heads, attention, tensor_size)
    if linear.out_features % tensor_size:
        _check_divides(path, linear.out_features, "output features", tensor_size)
    return ColumnParallel()


def _key_or_value(path: str, heads: int, attention: Attention, tensor_size: int) -> Style:
    if tensor_size <= heads or tensor_size % heads:
        _check_divides(path, heads, "key and value heads", tensor_size)
        return ColumnParallel(num_heads=heads)
    if attention.groups is None:
        raise ConfigError(
            f"{path} has {heads} heads, which {tensor_size} tensor-parallel ranks would have to "
            f"share, and {type(attention.module).__name__} has no num_key_value_groups, by which "
            "a rank repeats a shared head for its queries. Set tensor_model_parallel_size to a "
            f"divisor of {heads}."
        )
    return KeyOrValue(heads)


def _check_divides(path: str, count: int, what: str, tensor_size: int) -> None:
    if count % tensor_size:
        raise ConfigError(
            f"{path} has {count} {what}, which {tensor_size} tensor-parallel ranks cannot share "
            f"equally. Set tensor_model_parallel_size to a divisor of {count}."
        )


def count_rewrites(
    attentions: Iterable[Attention], tensor_size: int
) -> dict[str, Callable[[int, ParallelContext], int]]:
    """Return the attributes of the attention modules that become local: path -> rewrite.

    The attributes are repetitions of a shared key, and head counts read by the forward.
    """
    rewrites: dict[str, Callable[[int, ParallelContext], int]] = {}
    for attention in attentions:
        module, path = attention.module, attention.path
        key = getattr(module, "k_proj", None)
        key = base_layer(key) if isinstance(key, nn.Module) else None
        heads = attention.key_value_heads(key) if isinstance(key, nn.Linear) else None
        if attention.groups is not None and heads is not None and heads < tensor_size:
            rewrites[f"{path}.num_key_value_groups"] = partial(local_heads_per_group, heads)
        for name in _read_in_forward(module):
            if name in _COUNTS and isinstance(getattr(module, name, None), int):
                rewrites[f"{path}.{name}"] = local_count
    return rewrites


def local_count(count: int, context: ParallelContext) -> int:
    """Return how many of ``count`` heads a rank has."""
    return max(1, count // context.tp.size)


def _read_in_forward(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the attributes and globals in the source of the module's forward."""
    code: Any = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names
