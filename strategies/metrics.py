"""torchmetrics objects under a pipeline: only the last stage updates them, every rank computes the same value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from megatron_lightning.parallel.context import ParallelContext


class MetricSync:
    """Gathers metric states over the data-parallel ranks of the last stage and gives the result to all stages."""

    def __init__(self, module: nn.Module, context: ParallelContext) -> None:
        self._context = context
        self.in_step = False
        """Whether a pipelined step runs, in which only the last stage reaches the metrics."""
        self._metrics = {path: metric for path, metric in module.named_modules() if isinstance(metric, Metric)}
        for metric in self._metrics.values():
            if metric.dist_sync_fn is None and context.world_size > 1:
                metric.dist_sync_fn = self.gather

    def __deepcopy__(self, memo: object) -> MetricSync:
        return self  # a copied metric synchronises over the same ranks

    def release(self) -> None:
        """Give the metrics their own synchronisation back."""
        for metric in self._metrics.values():
            if metric.dist_sync_fn == self.gather:
                metric.dist_sync_fn = None

    def gather(self, state: Tensor, group: Any = None) -> list[Tensor]:
        """Return the states of all data-parallel ranks (torchmetrics' ``dist_sync_fn``).

        Tensor-parallel ranks hold equal states and count once. A ``group`` of the user's is followed as it is.
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
        """Return what :meth:`follow` needs on the other stages: how often each metric was updated, how long its lists are."""
        return {path: [metric._update_count, *map(len, _lists(metric).values())] for path, metric in self._metrics.items()}

    def follow(self, counts: Mapping[str, Sequence[int]]) -> None:
        """Make this stage's metrics know that the last stage updated them.

        A metric that was updated drops its cached value, so that all ranks take part in the next ``compute``. Its lists get as
        many entries as the last stage's, so that torchmetrics, which gathers entry by entry, asks for as many here; what is in
        them does not matter.
        """
        for path, metric in self._metrics.items():
            count, *lengths = counts.get(path, [metric._update_count])
            if metric._update_count == count:
                continue
            metric._update_count, metric._computed = count, None
            for (name, entries), length in zip(_lists(metric).items(), lengths, strict=True):
                empty = torch.empty(0, device=metric.device)
                setattr(metric, name, (entries + [empty] * length)[:length])


def _lists(metric: Metric) -> dict[str, list[Tensor]]:
    """Return a metric's states that are lists; one that was put together already has no entries to gather."""
    names = [name for name, default in metric._defaults.items() if isinstance(default, list)]
    return {name: entries if isinstance(entries := getattr(metric, name), list) else [] for name in names}
