"""Rows of plans for ``transformers`` models: tied parameters are split alike, equal layers share a
row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import nn

from megatron_lightning.layers.styles import ParameterShards, RowParallel, Split, VocabParallel
from megatron_lightning.parallel.shards.attachments import base_layer, own_path
from megatron_lightning.parallel.shards.patterns import compile_pattern
from megatron_lightning.parallel.shards.sharding import Style
from megatron_lightning.parallel.shards.ties import shared_names

_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""Number of a layer in a path."""

VOCABULARY = VocabParallel(shard_sequence=False, gather_output=True)
"""Style of both ends: an embedding, and an output layer with full logits."""


def split_both_ends(model: nn.Module, rows: Mapping[str, Style]) -> dict[str, Style]:
    """Return ``rows`` (module path -> style) with equal styles for modules with a shared parameter.

    An embedding and an output layer get the same rows. Another parameter tied to the output layer's
    bias is split like the bias. A tied parameter without such a form stays full on every rank.
    """
    styles = dict(rows)
    tied = [
        [
            (own_path(owner), own_name)
            for owner, _, own_name in (name.rpartition(".") for name in names)
        ]
        for names in shared_names(model)
    ]
    # Weights first: their output layers decide over biases.
    for group in sorted(tied, key=lambda group: any(own_name != "weight" for _, own_name in group)):
        owners = [owner for owner, _ in group]
        styles_before = [styles.get(owner) for owner in owners]
        if styles_before[0] is not None and all(
            style == styles_before[0] for style in styles_before
        ):
            continue
        if all(style is None for style in styles_before):
            continue
        modules = [base_layer(model.get_submodule(owner)) for owner in owners]
        ends = [isinstance(module, nn.Embedding | nn.Linear) for module in modules]
        # Both ends of the model: the vocabulary is sharded in both, so that they share one shard.
        if all(ends) and not any(isinstance(style, RowParallel) for style in styles_before):
            styles |= dict.fromkeys(owners, VOCABULARY)
        elif VOCABULARY in styles_before and any(ends):
            styles |= {
                owner: ParameterShards({own_name: Split(uneven=True)})
                for (owner, own_name), end in zip(group, ends, strict=True)
                if not end
            }
        else:
            for owner in owners:
                styles.pop(owner, None)
    return styles


def as_patterns(rows: Mapping[str, Style], paths: Iterable[str]) -> dict[str, Style]:
    """Return ``rows`` with one pattern for layers of equal style, if the pattern matches nothing
    else.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for path, style in rows.items():
        groups.setdefault((_LAYER.sub("*", path), repr(style)), []).append(path)
    compact: dict[str, Style] = {}
    for (pattern, _), group in groups.items():
        matches = compile_pattern(pattern).fullmatch
        alike = {path for path in paths if matches(path)} == set(group)
        compact |= {pattern: rows[group[0]]} if alike else {path: rows[path] for path in group}
    return compact
