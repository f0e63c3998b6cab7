"""Refuse equal values drawn by hooks into different shards, or into layers of different stages."""

from __future__ import annotations

from typing import cast

from megatron_lightning.assembly.fsdp import is_sharded
from megatron_lightning.guards.guard import Fit, Guard
from megatron_lightning.guards.watches.shard_draws import check_draws, equal_shards
from megatron_lightning.guards.watches.stage_draws import StageDraws
from megatron_lightning.step.participant import StepBatch
from megatron_lightning.step.run_context import RunContext


class EqualDraws(Guard):
    """Compare shards, and layers of stages, with their values when training was set up."""

    sentence = (
        "a hook draws the same random numbers into different shards of a parameter, or into layers "
        "of different pipeline stages"
    )

    def __init__(self, scope: RunContext, fit: Fit | None = None) -> None:
        super().__init__(scope, fit)
        self._record()

    @classmethod
    def applies(cls, scope: RunContext, fit: Fit | None) -> bool:
        """Return whether a rank of a fit has a part of the model."""
        has_part = scope.context.layout.model_parallel_size * scope.context.pp.size > 1
        return fit is not None and (has_part or is_sharded(scope.module))

    def loaded(self) -> None:
        """Accept shards and layers made equal by a checkpoint. A collective."""
        self._record()

    def _record(self) -> None:
        """Record the equal shards and layers. Shards are those of the module's first fit: hooks may
        draw before the setup of a second fit.
        """
        module, part, context = self.scope.module, self.scope.part, self.scope.context
        self._stages = StageDraws(module, part, context)
        if self.title() not in self.scope.notes:
            self.scope.notes[self.title()] = equal_shards(module, part.specs, context)

    def hooks_ran(self, batch: StepBatch) -> None:
        """Check the first batch of an epoch, and the first batch after a validation. A collective.

        Raises:
            ShardingError: If a hook drew equal numbers.
        """
        if not batch.compares:
            return
        module, part, context = self.scope.module, self.scope.part, self.scope.context
        equal_before = cast("list[tuple[str, str]]", self.scope.notes[self.title()])
        with self.judge.judging():
            check_draws(module, part.specs, context, equal_before)
            self._stages.check()
