"""The start line of an optimizer: its parameter groups, with counts of the full model."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from megatron_lightning.optim.stepping.distributed import DistributedOptimizer
from megatron_lightning.parallel.grid.context import AxisGroup

_ALWAYS = ("lr", "weight_decay")
_NO_OPTIONS = ("params", "name", "initial_lr", "wd_mult", "lr_mult", "min_lr")


def print_groups(views: Iterable[DistributedOptimizer], pp: AxisGroup) -> None:
    """Print each optimizer with more than one parameter group on rank 0. A collective over
    ``pp``.
    """
    views = list(views)
    for view, counts in zip(views, _counts(views, pp), strict=True):
        groups = view.optimizer.param_groups
        if len(groups) < 2:
            continue
        kind = type(view.optimizer).__name__
        texts = [
            f"{group.get('name', index)} {counts.get(index, 0):,} ({_options(group, groups)})"
            for index, group in enumerate(groups)
        ]
        rank_zero_info(
            f"MegatronStrategy: {kind} steps {sum(counts.values()):,} parameters in "
            f"{len(groups)} groups: {', '.join(texts)}."
        )


def _counts(views: list[DistributedOptimizer], pp: AxisGroup) -> list[dict[int, int]]:
    """Return, for each optimizer, group -> elements of its parameters in the full model."""
    own: list[dict[str, tuple[int, int]]] = []
    for view in views:
        number_of = {id(group): index for index, group in enumerate(view.optimizer.param_groups)}
        sizes = {entry.global_name: prod(entry.spec.global_shape) for entry in view.entries}
        groups = {entry.global_name: number_of.get(id(entry.group), 0) for entry in view.entries}
        own.append({name: (groups[name], size) for name, size in sizes.items()})
    ranks, counts = pp.all_gather_object(own), []
    for index in range(len(views)):
        full = {name: value for rank in ranks for name, value in rank[index].items()}
        of_groups: dict[int, int] = {}
        for group, size in full.values():
            of_groups[group] = of_groups.get(group, 0) + size
        counts.append(of_groups)
    return counts


def _options(group: dict[str, Any], groups: list[dict[str, Any]]) -> str:
    """Return the rates of a group, and the options in which groups differ."""
    shown = [key for key in _ALWAYS if key in group]
    shown += [
        key
        for key in group
        if key not in {*_ALWAYS, *_NO_OPTIONS}
        and any(other.get(key, group[key]) != group[key] for other in groups)
    ]
    values = {key: group[key] for key in shown}
    if "lr" in values:
        values["lr"] = group.get("initial_lr", group["lr"])  # not the first of a warm-up
    return ", ".join(f"{key} {_text(value)}" for key, value in values.items())


def _text(value: object) -> str:
    return f"{float(value):g}" if isinstance(value, int | float) else str(value)
