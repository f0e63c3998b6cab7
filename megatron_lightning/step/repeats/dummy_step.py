"""A step run for its collectives alone, without a trace."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import lightning.pytorch as pl

from megatron_lightning.parallel.random.replica_rng import ReplicaRng
from megatron_lightning.pipeline.batch.metrics import MetricSync
from megatron_lightning.pipeline.batch.module_state import ModuleState
from megatron_lightning.pipeline.stages.parallel_call import replaced_attribute
from megatron_lightning.step.run_context import RunContext


@contextmanager
def unseen(scope: RunContext, metrics: MetricSync) -> Generator[None, None, None]:
    """Undo a step's changes after the block: metrics, values on the module, random states. Nothing
    is logged.
    """
    module, context = scope.module, scope.context
    stages = [0] if scope.part.partition is None else scope.part.partition.own
    values = ModuleState(module, pl.LightningModule, (), stages, context.device)
    rng = ReplicaRng(context.device)
    drawn, streams = rng.everything(), context.rng.state_dict()
    values.begin(undone=True)
    try:
        with metrics.restored(), replaced_attribute(module, "log", lambda *_, **__: None):
            yield
    finally:
        values.undo()
        rng.restore(drawn)
        context.rng.load_state_dict(streams)
