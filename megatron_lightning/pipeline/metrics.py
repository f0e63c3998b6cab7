"""Synchronize torchmetrics objects under a pipeline: the last stage updates them, every rank
computes the same value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.context import ParallelContext


class MetricSync:
    """Gather of metric states over the data-parallel ranks of the last stage, broadcast to all
    stages.
    """

    def __init__(self, module: nn.Module, context: ParallelContext) -> None:
        self._context = context
        self.in_step = False
        """Whether a pipelined step runs, where only the last stage reaches the metrics."""
        self._metrics = {
            path: metric for path, metric in module.named_modules() if isinstance(metric, Metric)
        }
        for metric in self._metrics.values():
            if metric.dist_sync_fn is None and context.world_size > 1:
                metric.dist_sync_fn = self.gather

    def __deepcopy__(self, memo: object) -> MetricSync:
        return self  # a copied metric synchronizes over the same ranks

    def release(self) -> None:
        """Restore the metrics' own synchronization."""
        for metric in self._metrics.values():
            if metric.dist_sync_fn == self.gather:
                metric.dist_sync_fn = None

    def gather(self, state: Tensor, group: Any = None) -> list[Tensor]:
        """Return the states of all data-parallel ranks (torchmetrics' ``dist_sync_fn``).

        Tensor-parallel ranks hold equal states and count once. A ``group`` passed by the user is
        used unchanged.
        """
        if group is not None and group is not dist.group.WORLD:
            return gather_all_tensors(state, group)
        context = self._context
        states: list[Tensor] = [state]
        if context.pp.rank == 0 and context.dp_cp.size > 1:
            states = gather_all_tensors(state, context.dp_cp.process_group)
        if context.pp.size > 1 and not self.in_step:
            gathered = [s.cpu() for s in states] if context.pp.rank == 0 else []
            states = [s.to(state.device) for s in context.pp.broadcast_object(gathered)]
        return states

    def counts(self) -> dict[str, list[int]]:
        """Return each metric's number of updates and the lengths of its lists, for :meth:`follow`
        on other stages.
        """
        return {
            path: [metric._update_count, *map(len, _lists(metric).values())]
            for path, metric in self._metrics.items()
        }

    def follow(self, counts: Mapping[str, Sequence[int]]) -> None:
        """Mark this stage's metrics as updated like the last stage's.

        An updated metric drops its cached value, so that all ranks take part in the next
        ``compute``. Its lists get as many (empty) entries as the last stage's, since torchmetrics
        gathers entry by entry.
        """
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
    """Refuse persistent metric states, of which a checkpoint holds one, where each of several
    replicas has its own.
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


def _lists(metric: Metric) -> dict[str, list[Tensor]]:
    """Return a metric's states that are lists; one that was concatenated already has no entries to
    gather.
    """
    names = [name for name, default in metric._defaults.items() if isinstance(default, list)]
    return {
        name: entries if isinstance(entries := getattr(metric, name), list) else []
        for name in names
    }
