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

from megatron_lightning.assembly.replicas import check_trained_replicas
from megatron_lightning.parallel.shards.other_stages import is_absent
from megatron_lightning.pipeline.stages.stage import StagePartition
from megatron_lightning.step.run_context import RunContext


def check_averages(scope: RunContext) -> None:
    """Check that stages hold equal copies. A collective of all ranks, with the weights gathered.

    Raises:
        ShardingError: Names the tensors with different values, and the callbacks to use.
    """
    partition = scope.part.partition
    if partition is None:
        return
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
