"""Merge the parameter groups of all pipeline ranks into the full model's, and find a rank's own
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def merge_groups(
    ranks: Sequence[Sequence[Mapping[str, Any]]], place: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Merge the groups of all stages, in order, by name or by equal hyper-parameters; a stage may
    lack empty ones.
    """
    merged: dict[tuple[str, int], dict[str, Any]] = {}
    for groups in ranks:
        seen: Counter[str] = Counter()
        for group in groups:
            values = {key: value for key, value in group.items() if key != "params"}
            identity = repr(values.get("name") or sorted(values.items()))
            entry = merged.setdefault((identity, seen[identity]), {**values, "params": []})
            entry["params"] += [name for name in group["params"] if name not in entry["params"]]
            seen[identity] += 1
    for entry in merged.values():
        entry["params"].sort(key=lambda name: place.get(name, len(place)))
    return list(merged.values())


def groups_of_rank(
    local: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the saved group of each local one: by its parameters, its name, or its position."""
    holder = {name: group for group in saved for name in group["params"]}
    named = {group["name"]: group for group in saved if "name" in group}
    by_place = [saved[min(index, len(saved) - 1)] for index in range(len(local))]
    return [
        holder.get(next(iter(group["params"]), ""), named.get(group.get("name"), by_place[index]))
        for index, group in enumerate(local)
    ]
