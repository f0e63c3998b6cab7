"""Refuse different batches on the ranks of a replica."""

from __future__ import annotations

from megatron_lightning.assembly.checks.replicas import check_same_batch
from megatron_lightning.guards.guard import Fit, Guard
from megatron_lightning.step.participant import StepBatch
from megatron_lightning.step.run_context import RunContext


class SameBatches(Guard):
    """Compare the first batch of every loader between the ranks of a replica."""

    sentence = (
        "the first batch of a DataLoader differs between the ranks of a replica, which work on "
        "one batch together: activations of different shapes would make the ranks wait forever"
    )
    may_warn = False

    @classmethod
    def applies(cls, scope: RunContext, fit: Fit | None) -> bool:
        """Return whether a replica has several ranks."""
        return scope.context.layout.replica_size > 1

    def begin_batch(self, batch: StepBatch) -> None:
        """Compare. A collective for the first batch of a loader."""
        if batch.is_first:
            with self.judge.judging():
                check_same_batch(batch.value, self.scope.context)
