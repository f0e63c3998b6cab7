"""Synchronize torchmetrics objects, so that every rank computes the same value: over the
data-parallel ranks, and under a pipeline from the last stage, the only stage with updates.

The search for metrics covers the attributes of the module and of callbacks, including dicts, lists
and plain objects. A metric outside of the search, such as a local variable, synchronizes by the
default function of torchmetrics. The run replaces the default function.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics.metric
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.grid.context import ParallelContext

_LIBRARIES = frozenset(
    {"torch", "lightning", "pytorch_lightning", "megatron_lightning", "transformers", "numpy"}
)
_OF_MODULES = frozenset(vars(nn.Module()))
_DEPTH = 4  # containers and objects around a metric
_MOST_ENTRIES = 256  # a vocabulary is not searched


@dataclass(frozen=True)
class _Gather:
    """Gather of a metric's states (torchmetrics' ``dist_sync_fn``)."""

    sync: MetricSync
    path: str

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        return self.sync.gather(state, group, updated_in_steps=self.path in self.sync.in_steps)

    def __deepcopy__(self, memo: object) -> _Gather:
        return self  # a copied metric synchronizes over the same ranks


class MetricSync:
    """Gather of metric states over the data-parallel ranks of the last stage, broadcast to all
    stages.

    Args:
        module: The LightningModule.
        context: Groups of this rank.
        callbacks: Return the current callbacks.
    """

    def __init__(
        self,
        module: nn.Module,
        context: ParallelContext,
        callbacks: Callable[[], Iterable[object]] = tuple,
    ) -> None:
        self._module = module
        self._context = context
        self._callbacks = callbacks
        self.in_step = False
        """Whether a pipelined step runs, so that only the last stage reaches the metrics."""
        self.in_steps: set[str] = set()
        """Metrics updated in steps. Where ranks share sequences, the updates are of a part of each
        sequence."""
        self._metrics: dict[str, Metric] = {}
        self._torchmetrics = vars(torchmetrics.metric)
        self._default = self._torchmetrics["gather_all_tensors"]
        self._before: dict[str, int] = {}
        self.find()
        if context.world_size > 1:
            self._torchmetrics["gather_all_tensors"] = self.gather

    def find(self) -> None:
        """Look for metrics again, since hooks make new metrics."""
        self._metrics = dict(_metrics_of(self._module, self._callbacks()))
        if self._context.world_size == 1:
            return
        for path, metric in self._metrics.items():
            if metric.dist_sync_fn is None or isinstance(metric.dist_sync_fn, _Gather):
                metric.dist_sync_fn = _Gather(self, path)

    def release(self) -> None:
        """Restore the metrics' own synchronization."""
        self._torchmetrics["gather_all_tensors"] = self._default
        for metric in self._metrics.values():
            if isinstance(metric.dist_sync_fn, _Gather):
                metric.dist_sync_fn = None

    def gather(
        self, state: Tensor, group: Any = None, *, updated_in_steps: bool | None = None
    ) -> list[Tensor]:
        """Return the states of all data-parallel ranks (torchmetrics' ``dist_sync_fn``).

        Ranks of a replica with equal states count once: tensor-parallel ranks always,
        context-parallel ranks if hooks updated the metric, with whole batches. A ``group`` passed
        by the user is used unchanged.
        """
        if group is not None and group != dist.group.WORLD:
            return gather_all_tensors(state, group)
        context = self._context
        of_parts = self.in_step if updated_in_steps is None else updated_in_steps
        ranks = context.dp_cp if of_parts else context.dp
        states: list[Tensor] = [state]
        if context.pp.rank == 0 and ranks.size > 1:
            states = gather_all_tensors(state, ranks.process_group)
        if context.pp.size > 1 and not self.in_step:
            gathered = [s.cpu() for s in states] if context.pp.rank == 0 else []
            states = [s.to(state.device) for s in context.pp.broadcast_object(gathered)]
        return states

    @contextmanager
    def restored(self) -> Generator[None, None, None]:
        """Restore the metrics' previous states after the block, which may update the metrics."""
        records = [
            (vars(metric), dict(vars(metric)), _states(metric)) for metric in self._metrics.values()
        ]
        try:
            yield
        finally:
            for attributes, values, states in records:
                attributes.update(values)
                attributes.update(states)

    def begin_step(self) -> None:
        """Record the number of updates of each metric before a step."""
        self._before = {path: metric._update_count for path, metric in self._metrics.items()}

    def counts(self) -> dict[str, list[int]]:
        """Return each metric's number of updates and the lengths of the metric's lists after a
        step, for :meth:`follow` on other stages.
        """
        counts = {
            path: [metric._update_count, *map(len, _lists(metric).values())]
            for path, metric in self._metrics.items()
        }
        self._mark_updated(counts)
        return counts

    def _mark_updated(self, counts: Mapping[str, Sequence[int]]) -> None:
        updated = {path for path, (count, *_) in counts.items() if count != self._before.get(path)}
        self.in_steps |= updated & self._before.keys()

    def follow(self, counts: Mapping[str, Sequence[int]]) -> None:
        """Mark this stage's metrics as updated like the last stage's.

        An updated metric drops the cached value, so that all ranks take part in the next
        ``compute``. The metric's lists get as many (empty) entries as the last stage's lists, since
        torchmetrics gathers entry by entry.
        """
        self._mark_updated(counts)
        for path, metric in self._metrics.items():
            count, *lengths = counts.get(path, [metric._update_count])
            if metric._update_count == count:
                continue
            metric._update_count = count
            metric._computed = None
            for (name, entries), length in zip(_lists(metric).items(), lengths, strict=True):
                empty = torch.empty(0, device=metric.device)
                setattr(metric, name, (entries + [empty] * length)[:length])


def check_persistent_states(module: nn.Module, num_replicas: int) -> None:
    """Refuse persistent metric states with several replicas. Each replica has a state of its own,
    and a checkpoint holds only a single state.
    """
    if num_replicas == 1:
        return
    for path, metric in module.named_modules():
        kept = [
            name for name, persistent in getattr(metric, "_persistent", {}).items() if persistent
        ]
        if isinstance(metric, Metric) and kept:
            raise CheckpointError(
                f"{path} is a {type(metric).__name__} with persistent states ({', '.join(kept)}), "
                f"and each of the {num_replicas} data-parallel ranks has its own: a checkpoint "
                f"holds one. Call {path}.persistent(False) in __init__, so that the metric starts "
                "again after a resume, or use one data-parallel rank."
            )


def _metrics_of(module: nn.Module, callbacks: Iterable[object]) -> Iterator[tuple[str, Metric]]:
    """Yield the metrics of a module and of callbacks, with a path equal on all ranks."""
    seen_ids: set[int] = set()
    for path, child in module.named_modules():
        if isinstance(child, Metric):
            seen_ids.add(id(child))
            yield path, child
    for path, child in module.named_modules():
        if child is module or _is_users(child):
            for name in vars(child).keys() - _OF_MODULES:
                yield from _inside(vars(child)[name], f"{path}.{name}".lstrip("."), seen_ids)
    for index, callback in enumerate(callbacks):
        yield from _inside(callback, f"callbacks[{index}]", seen_ids)


def _inside(value: Any, path: str, seen: set[int], depth: int = 0) -> Iterator[tuple[str, Metric]]:
    """Yield the metrics in an attribute that are not in ``seen``."""
    if isinstance(value, str | bytes | int | float | Tensor | type(None)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        for inner, child in value.named_modules():
            if isinstance(child, Metric) and (child is value or id(child) not in seen):
                seen.add(id(child))
                yield f"{path}.{inner}".rstrip("."), child
        return
    if depth == _DEPTH:
        return
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, list | tuple):
        entries = enumerate(value)
    elif isinstance(value, Mapping):
        entries = value.items()
    elif _is_users(value):
        entries = vars(value).items()
    for key, entry in islice(entries, _MOST_ENTRIES):
        yield from _inside(entry, f"{path}.{key}", seen, depth + 1)


def _is_users(value: object) -> bool:
    """Whether an object with attributes is of a class outside of the libraries."""
    kind = type(value)
    return hasattr(value, "__dict__") and kind.__module__.partition(".")[0] not in _LIBRARIES


def _states(metric: Metric) -> dict[str, Any]:
    """Return copies of a metric's states, by their names."""
    states = {name: getattr(metric, name) for name in metric._defaults}
    return {
        name: list(state) if isinstance(state, list) else state.clone()
        for name, state in states.items()
    }


def _lists(metric: Metric) -> dict[str, list[Tensor]]:
    """Return a metric's list states. A list already concatenated has no entries to gather."""
    names = [name for name, default in metric._defaults.items() if isinstance(default, list)]
    return {
        name: entries if isinstance(entries := getattr(metric, name), list) else []
        for name in names
    }
