"""Merge the parameter groups of all pipeline ranks into the full model's, find a rank's groups
again, and compare configured groups with the groups of a checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_lightning.errors import CheckpointError


def merge_groups(
    ranks: Sequence[Sequence[Mapping[str, Any]]], place: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Merge the groups of all stages, in order, by name or by equal hyper-parameters. A stage may
    lack empty groups.
    """
    merged: dict[tuple[str, int], dict[str, Any]] = {}
    for groups in ranks:
        counts: Counter[str] = Counter()
        for group in groups:
            values = {key: value for key, value in group.items() if key != "params"}
            identity = repr(values.get("name") or sorted(values.items()))
            entry = merged.setdefault((identity, counts[identity]), {**values, "params": []})
            entry["params"] += [name for name in group["params"] if name not in entry["params"]]
            counts[identity] += 1
    for entry in merged.values():
        entry["params"].sort(key=lambda name: place.get(name, len(place)))
    return list(merged.values())


def groups_of_rank(
    local: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the saved group of each local group: by the group's parameters, name, or position."""
    holder = {name: group for group in saved for name in group["params"]}
    groups_by_name = {group["name"]: group for group in saved if "name" in group}
    by_place = [saved[min(index, len(saved) - 1)] for index in range(len(local))]
    return [
        holder.get(
            next(iter(group["params"]), ""), groups_by_name.get(group.get("name"), by_place[index])
        )
        for index, group in enumerate(local)
    ]


def check_regrouping(
    kind: str, local: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Check that no parameter would take the options of another saved group.

    Args:
        kind: Class of the optimizer.
        local: This rank's groups, as configured.
        saved: Groups of the checkpoint.

    Raises:
        CheckpointError: If parameters saved in groups of different options are in the same group
            now, or the other way round.
    """
    _check_division(kind, local, saved, "are in one group now, and were saved in groups with")
    _check_division(kind, saved, local, "were saved in one group, and are now in groups with")


def _check_division(
    kind: str, groups: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], how: str
) -> None:
    """Check that ``others`` give equal options to all parameters of a group in ``groups``."""
    holder = {name: group for group in others for name in group["params"]}
    for group in groups:
        names = [name for name in group["params"] if name in holder]
        options = [_options(holder[name]) for name in names]
        for name, options_of_group in zip(names, options, strict=True):
            keys = sorted(
                key
                for key in options_of_group | options[0]
                if options_of_group.get(key) != options[0].get(key)
            )
            if keys:
                values = "; ".join(
                    f"{group_name}: " + ", ".join(f"{key}={had.get(key)}" for key in keys)
                    for group_name, had in ((names[0], options[0]), (name, options_of_group))
                )
                raise CheckpointError(
                    f"parameters of {kind} {how} other options ({values}), so that some would take "
                    "the options of a group that is not theirs. Group the parameters as they were "
                    "saved, or load the weights alone."
                )


def _options(group: Mapping[str, Any]) -> dict[str, str]:
    left_out = ("params", "param_names", "name")
    return {key: repr(value) for key, value in group.items() if key not in left_out}
