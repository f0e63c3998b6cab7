"""Weights written by hooks between two training batches."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from megatron_lightning.assembly.plan_watch import PlanWatch
from megatron_lightning.optim.gradients.accumulation import GradientAccumulation
from megatron_lightning.step.participant import StepBatch, StepParticipant
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.strategies.step.checks.averages import check_averages
from megatron_lightning.strategies.step.checks.shard_writes import ShardWrites


class WrittenWeights(StepParticipant):
    """Find weights written by hooks, and share these weights with all ranks before a training
    batch.

    Args:
        scope: The run context.
        accumulation: Knows the ranks sharing a weight.
        optimizers: The user's optimizers.
        plan_watch: Compares losses again after possible writes of weights.
    """

    def __init__(
        self,
        scope: RunContext,
        accumulation: GradientAccumulation,
        optimizers: Sequence[Optimizer],
        plan_watch: PlanWatch,
    ) -> None:
        self._scope = scope
        self._accumulation = accumulation
        self._shard_writes = ShardWrites(scope, optimizers)
        self._plan_watch = plan_watch
        self._num_batches = 0

    def begin_batch(self, batch: StepBatch) -> None:
        """Look for written weights, if due."""
        if not batch.trains:
            return
        accumulation = self._accumulation
        self._num_batches += 1
        if self._num_batches == 2 and not self._scope.options.is_native:
            accumulation.gather.wait()
            check_averages(self._scope)  # hooks of the first batch have run
        self._shard_writes.look()
        if accumulation.written.before_training(first=batch.number == 1):
            self._plan_watch.watch_loss()
        accumulation.gather.begin_step()

    def after_update(self, *, stepped: bool) -> None:
        """Record the versions of shards after a step."""
        self._shard_writes.record()
