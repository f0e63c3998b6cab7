"""Values changed on the module by a step outside of the pipeline's units, sent from the last stage
to all stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from megatron_lightning.pipeline.batch.module_state import Change, ModuleState
from megatron_lightning.pipeline.batch.records import MOST_ENTRIES
from megatron_lightning.pipeline.stages.stage import StagePartition
from megatron_lightning.step.participant import StepParticipant
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.step_run import StepRun


class ModuleValues(StepParticipant):
    """Send the values left on the module by the last stage's step.

    Args:
        scope: The run context.
        partition: The pipelined module and its stages.
    """

    def __init__(self, scope: RunContext, partition: StagePartition) -> None:
        units = [partition.module.get_submodule(unit) for unit in partition.modules]
        self._state = ModuleState(
            scope.module, pl.LightningModule, units, partition.own, scope.context.device
        )
        self._is_last_stage = scope.context.pp.rank == 0
        self._unsent: set[str] = set()  # named once

    def begin(self, run: StepRun) -> None:
        """Record the values before the run."""
        self._state.begin()

    def around_forward(
        self, run: StepRun, stage: int, microbatch: int
    ) -> AbstractContextManager[None]:
        """Give the stage the values left by the stage's own forwards."""
        self._state.enter(stage)
        return nullcontext()

    def end(self, run: StepRun) -> None:
        """Leave the values of the last of this rank's stages."""
        self._state.end()

    def share(self, run: StepRun) -> list[Change]:
        """Return the changes. Warn once of values that stay on this stage."""
        changes, unsent = self._state.changes()
        paths = [place for place in unsent if place not in self._unsent]
        if paths:
            self._unsent.update(paths)
            rank_zero_warn(
                f"{run.hook} changes {', '.join(paths[:3])}, and only the last pipeline stage has "
                "the new value: tensors, numbers, strings and containers of them are sent to the "
                f"other stages, and of containers of more than {MOST_ENTRIES:,} entries only new "
                "ones. Keep such values there if a hook reads them (many counts in a tensor)."
            )
        return changes

    def apply(self, run: StepRun, shared: Sequence[Change]) -> None:
        """Make the last stage's changes."""
        if not self._is_last_stage:
            self._state.apply(shared)

    def tensors(self) -> Sequence[Tensor]:
        """Return the tensors among the values."""
        return self._state.tensors()

    @contextmanager
    def rehearsed(self) -> Iterator[None]:
        """Restore the values after the block."""
        self._state.begin(undone=True)
        yield
        self._state.undo()
