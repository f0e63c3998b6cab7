"""Persistent states of torchmetrics in checkpoints: saved as those of one device, split again over any number of replicas.

Every data-parallel replica accumulates over its own samples. What stands in a checkpoint under a state's name is what
``dist_reduce_fx`` makes of all of them, so that one device, or plain Lightning, goes on from it; several replicas take parts of
it that reduce to the same value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.context import AxisGroup

_REDUCED = (dim_zero_sum, dim_zero_mean, dim_zero_min, dim_zero_max)


class MergedStates(NamedTuple):
    """The persistent metric states of all replicas."""

    merged: dict[str, Any]
    """Name in the module's state dict -> the state that one device would go on from."""
    apart: dict[str, list[Tensor]]
    """Name -> the states of the replicas, for those that only the metric's own ``compute`` can put together."""


class _State(NamedTuple):
    name: str
    metric: Metric
    attribute: str

    @property
    def value(self) -> Tensor | list[Tensor]:
        value: Tensor | list[Tensor] = getattr(self.metric, self.attribute)
        return value

    @property
    def reduction(self) -> Any:
        return self.metric._reductions[self.attribute]

    @property
    def is_list(self) -> bool:
        return isinstance(self.metric._defaults[self.attribute], list)


def merge_metric_states(module: nn.Module, replicas: AxisGroup) -> MergedStates:
    """Put the persistent metric states of all replicas together; all ranks call this.

    Args:
        module: Has the metrics.
        replicas: The ranks that saw other samples (data and context parallel); equal metrics stand on all of them.
    """
    states = list(_persistent(module))
    if replicas.size == 1 or not states:
        return MergedStates({}, {})
    ranks = replicas.all_gather_object([tree_map_only(Tensor, lambda t: t.detach().cpu(), state.value) for state in states])
    result = MergedStates({}, {})
    for state, *values in zip(states, *ranks, strict=True):
        if state.is_list:
            merged: Any = _joined(values, by_rank=state.reduction is dim_zero_cat)
        elif state.reduction in _REDUCED:
            merged = state.reduction(torch.stack(values))
        else:
            merged, result.apart[state.name] = values[0], values
        result.merged[state.name] = _moved(merged, state.metric.device)
    if result.apart:
        rank_zero_warn(
            f"The persistent metric states {', '.join(result.apart)} have no dist_reduce_fx of sum, mean, min, max or cat. "
            f"Each of the {replicas.size} data-parallel ranks keeps its own; training can be resumed with as many only."
        )
    return result


def split_metric_states(
    module: nn.Module, replicas: AxisGroup, saved: Mapping[str, Any], apart: Mapping[str, Sequence[Tensor]]
) -> dict[str, Any]:
    """Return this replica's part of the persistent metric states in a module's state dict.

    The first replica goes on with sums and lists, the others from nothing; means, minima and maxima are everybody's, so that
    the value over all replicas is the saved one.

    Args:
        module: Has the metrics.
        replicas: As for :func:`merge_metric_states`; not necessarily as many as saved it.
        saved: The state dict that was loaded.
        apart: :attr:`MergedStates.apart` of the checkpoint.

    Raises:
        CheckpointError: If a state cannot be divided among this many replicas.
    """
    states = [state for state in _persistent(module) if state.name in saved]
    parts = {state.name: _part(state, replicas, saved[state.name], apart.get(state.name)) for state in states}
    devices = {state.name: state.metric.device for state in states}
    return {name: _moved(part, devices[name]) for name, part in parts.items()}


def _part(state: _State, replicas: AxisGroup, value: Any, apart: Sequence[Tensor] | None) -> Any:
    first = replicas.rank == 0
    if state.is_list and state.reduction is dim_zero_cat:
        # An empty entry of the same kind lets torchmetrics gather from every rank.
        rows = [entry if entry.dim() else entry.view(1) for entry in value]
        return rows if first else [entry[:0] for entry in rows[:1]]
    if state.is_list:
        if len(value) % replicas.size:
            raise _indivisible(state, replicas, f"a list of {len(value)} entries")
        return value[replicas.rank :: replicas.size]
    if state.reduction is dim_zero_sum:
        return value if first else torch.zeros_like(value)
    if state.reduction in _REDUCED:
        return value
    kept = apart or [value]
    if len(kept) != replicas.size:
        raise _indivisible(state, replicas, f"one state for each of {len(kept)} data-parallel ranks")
    return kept[replicas.rank]


def _moved(value: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


def _indivisible(state: _State, replicas: AxisGroup, found: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint holds {found} under the metric state {state.name}, whose dist_reduce_fx is {state.reduction}, and "
        f"there are {replicas.size} data-parallel ranks. Resume with as many as saved it, or make the state not persistent and "
        "load with strict_loading=False, so that it begins anew."
    )


def _joined(ranks: Sequence[list[Tensor]], *, by_rank: bool) -> list[Tensor]:
    """Return the entries of all ranks in the order in which torchmetrics gathers them: rank by rank, or entry by entry."""
    if by_rank:
        return [entry for rank in ranks for entry in rank]
    return [entry for entries in zip_longest(*ranks) for entry in entries if entry is not None]


def _persistent(module: nn.Module) -> Iterator[_State]:
    for path, metric in module.named_modules():
        if isinstance(metric, Metric):
            for attribute, kept in metric._persistent.items():
                if kept:
                    yield _State(f"{path}.{attribute}" if path else attribute, metric, attribute)
