"""Find averages of a pipelined model that mix layers of different stages, before the second batch
of a fit.

A hook for averaging a model by ``zip(copy.parameters(), model.parameters())`` pairs the copy's
layers in order with the layers of the rank's stages. Copies of the full model, made by the
LightningModule or a callback, differ between the stages after the first such hook.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from torch import nn

from megatron_lightning.assembly.checks.replicas import check_trained_replicas
from megatron_lightning.guards.guard import Fit, Guard
from megatron_lightning.parallel.shards.other_stages import is_absent
from megatron_lightning.pipeline.stages.stage import StagePartition
from megatron_lightning.step.participant import StepBatch
from megatron_lightning.step.run_context import RunContext


class Averages(Guard):
    """Compare copies of the model between stages, before the second batch of a fit."""

    sentence = (
        "an average of weights is kept by pairs of `parameters()`, which pairs layers of different "
        "pipeline stages"
    )

    def __init__(self, scope: RunContext, fit: Fit | None = None) -> None:
        super().__init__(scope, fit)
        self._gather = None if fit is None else fit.accumulation.gather
        self._num_batches = 0

    @classmethod
    def applies(cls, scope: RunContext, fit: Fit | None) -> bool:
        """Return whether a fit has pipeline stages."""
        return fit is not None and scope.part.partition is not None

    def hooks_ran(self, batch: StepBatch) -> None:
        """Check that stages hold equal copies. A collective of all ranks before the second batch.

        Raises:
            ShardingError: Names the tensors with different values, and the callbacks to use.
        """
        scope, partition = self.scope, self.scope.part.partition
        self._num_batches += batch.trains
        if not batch.trains or self._num_batches != 2 or partition is None or self._gather is None:
            return
        self._gather.wait()
        with self.judge.judging():
            check_trained_replicas(scope.module, scope.part, scope.context)
            trainer: Any = scope.module.trainer
            copies = _copies_of(partition, trainer.callbacks)
            check_trained_replicas(copies, scope.part, scope.context)


def _copies_of(partition: StagePartition, callbacks: Iterable[pl.Callback]) -> nn.Module:
    """Return a module with the callbacks' full copies of the pipelined module as children."""
    holder = nn.Module()
    for callback in callbacks:
        for name, value in vars(callback).items():
            modules = value.modules() if isinstance(value, nn.Module) else ()
            if any(_is_full_copy(module, partition) for module in modules):
                holder.add_module(f"{type(callback).__name__}_{name}", value)
    return holder


def _is_full_copy(module: nn.Module, partition: StagePartition) -> bool:
    if module is partition.module or type(module) is not type(partition.module):
        return False
    units = [module.get_submodule(unit) for unit in partition.units]
    return not any(map(is_absent, units))
