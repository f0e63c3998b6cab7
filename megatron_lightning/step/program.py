"""The user's step in the form of the pipeline's executor: a forward for each stage and
micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from megatron_lightning.errors import PipelineError
from megatron_lightning.optim.gradients.accumulation import GradientAccumulation
from megatron_lightning.pipeline.batch.microbatches import kinds_of, tensors_of
from megatron_lightning.pipeline.channel import StageTensors
from megatron_lightning.pipeline.stages.crossing import StageCrossing, StageExit
from megatron_lightning.step.participant import Participants
from megatron_lightning.step.step_run import StepRun


class UserProgram:
    """Compute the stages of this rank in a pipeline run.

    Args:
        run: The step and the micro-batches. Keeps the outputs of the last stage.
        participants: Take part in every forward and backward.
        crossing: Runs the stages at the step's call of the pipelined module. None with a single
            stage.
        accumulation: Receives the gradients. None: no backward.
        variable_shapes: Whether every message between stages carries its shapes.
    """

    def __init__(
        self,
        run: StepRun,
        participants: Participants,
        *,
        crossing: StageCrossing | None,
        accumulation: GradientAccumulation | None,
        variable_shapes: bool,
    ) -> None:
        self._run = run
        self._participants = participants
        self._crossing = crossing
        self._accumulation = accumulation
        self._variable_shapes = variable_shapes
        # Steps may leave out a sanity check, and depend on the loader's index.
        of_all = (run.hook, run.module.trainer.sanity_checking, run.indices[1:])
        self._signatures = [
            (*of_all, kinds_of(part), tuple(tuple(x.shape) for x in tensors_of(part)))
            for part in run.microbatches
        ]

    def forward(
        self, stage: int, microbatch: int, received: StageTensors | None
    ) -> tuple[Tensor, ...] | Tensor | None:
        """Run the user's step on ``microbatch`` for ``stage``."""
        run, crossing = self._run, self._crossing
        is_last = stage == run.last_stage
        try:
            with self._participants.around_forward(run, stage, microbatch):
                if crossing is not None:
                    crossing.enter(stage, microbatch, received, self.signature(microbatch))
                output = run.call(run.microbatches[microbatch], *run.indices)
        except StageExit as left:
            return None if is_last else left.outputs
        if crossing is not None and not crossing.crossed:
            self._check_uncrossed(stage, received)
            if not is_last:
                return StageTensors()
        if crossing is not None:
            crossing.check_result(output)
        loss = run.keep_output(microbatch, output)
        if run.hook == "training_step":
            self._participants.returned(run, microbatch, loss)
        return None if loss is None else run.weighted(microbatch, loss)

    def _check_uncrossed(self, stage: int, received: StageTensors | None) -> None:
        """Allow evaluation steps without a call of the module on any stage, since such steps send
        nothing.
        """
        if not self._run.trains and not (received and received.note):
            return
        raise PipelineError(
            f"{self._run.hook} returned on stage {stage} without calling the pipelined module. "
            "Call it exactly once in every training step, and in other steps on every stage or on "
            "none."
        )

    def signature(self, microbatch: int) -> Any:
        """Return names, shapes and dtypes of the micro-batch. Equal signatures give equal shapes of
        the stages' outputs.
        """
        return microbatch if self._variable_shapes else self._signatures[microbatch]

    @contextmanager
    def recomputing(self, stage: int, microbatch: int) -> Iterator[None]:
        """Enter around a backward that may recompute the forward of a stage."""
        crossing = self._crossing
        recomputing = nullcontext() if crossing is None else crossing.recomputing(stage, microbatch)
        with self._participants.around_backward(self._run, microbatch), recomputing:
            yield

    def completing(self, stage: int) -> AbstractContextManager[None]:
        """Mark the stage's gradients as complete at exit, so that reductions start."""
        accumulation = self._accumulation
        return nullcontext() if accumulation is None else accumulation.completing([stage])
