"""The user's step as the pipeline's executor calls it: one forward for each stage and
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron_lightning.errors import PipelineError
from megatron_lightning.pipeline.batch.microbatches import batch_size_of, kinds_of, tensors_of
from megatron_lightning.pipeline.channel import StageTensors
from megatron_lightning.pipeline.stages.crossing import StageCrossing, StageExit
from megatron_lightning.strategies.step.items import count_items, num_items_of
from megatron_lightning.strategies.step.logs import LogRecorder
from megatron_lightning.strategies.step.reports import StepReports
from megatron_lightning.strategies.step.training import Training


class UserProgram:
    """Compute the stages of this rank in one pipeline run; collect outputs, logs and item counts of
    the last stage.

    Args:
        module: The LightningModule.
        hook: Name of the step, such as ``"training_step"``.
        call: Called with a micro-batch and ``indices``: as a rule, the step.
        microbatches: The parts of the batch.
        indices: Further arguments of the step.
        crossing: Runs the stages where the step calls the pipelined module; None with one stage.
        around: Returns what is put around one forward.
        around_backward: Returns what is put around one backward.
        begin_forward: Called with the stage and the micro-batch before a forward.
        reports: Takes what layers report.
        training: Where gradients go; None: there is no backward.
        variable_shapes: Whether every message between stages carries its shapes.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        hook: str,
        call: Callable[..., Any],
        microbatches: Sequence[Any],
        indices: tuple[Any, ...],
        *,
        crossing: StageCrossing | None,
        around: Callable[[], AbstractContextManager[None]],
        around_backward: Callable[[], AbstractContextManager[Any]],
        begin_forward: Callable[[int, int], None],
        reports: StepReports,
        training: Training | None,
        variable_shapes: bool,
    ) -> None:
        self._module = module
        self._hook = hook
        self._call = call
        self._microbatches = microbatches
        self._indices = indices
        self._crossing = crossing
        self._around = around
        self._around_backward = around_backward
        self._begin_forward = begin_forward
        self._reports = reports
        self._training = training
        self._variable_shapes = variable_shapes
        self.sizes = [batch_size_of(part) for part in microbatches]
        known = [float(size) for size in self.sizes if size]
        self._weights = known if len(known) == len(self.sizes) else [1.0] * len(self.sizes)
        # Steps may leave out a sanity check, and depend on the loader's index.
        of_all = (hook, module.trainer.sanity_checking, indices[1:])
        self._signatures = [
            (*of_all, kinds_of(part), tuple(tuple(x.shape) for x in tensors_of(part)))
            for part in microbatches
        ]
        self._items: dict[int, Tensor] = {}
        self._counted: dict[int, Tensor | None] = {}  # before the step, by the module's method
        self.recorder = LogRecorder(module, self.sizes)
        if crossing is not None:
            crossing.logged = self.recorder.tensors
        self.outputs: dict[int, Any] = {}

    def forward(
        self, stage: int, microbatch: int, received: StageTensors | None
    ) -> tuple[Tensor, ...] | Tensor | None:
        """Run the user's step on ``microbatch`` as ``stage`` sees it."""
        crossing = self._crossing
        is_last = crossing is None or crossing.is_last(stage)
        self.recorder.microbatch = microbatch
        self._begin_forward(stage, microbatch)
        self._begin_reports(microbatch)
        if crossing is not None:
            crossing.enter(stage, microbatch, received, self.signature(microbatch))
        try:
            # The last stage logs what others log before the call.
            with self._around(), self.recorder.installed(keep=is_last):
                output = self._call(self._microbatches[microbatch], *self._indices)
        except StageExit as left:
            return None if is_last else left.outputs
        if crossing is not None and not crossing.crossed:
            self._check_uncrossed(stage, received)
            if not is_last:
                return StageTensors()
        if crossing is not None:
            crossing.check_result(output)
        return self._finish(microbatch, output)

    def _begin_reports(self, microbatch: int) -> None:
        """Give the losses that layers report the scale of the main loss, if it is known already."""
        self._reports.begin(microbatch)
        if self._training is None or not self._reports.exist:
            return
        if microbatch not in self._counted:
            self._counted[microbatch] = count_items(self._module, self._microbatches[microbatch])
        scale = self._scale(microbatch, self._counted[microbatch], self._training.loss_scale)
        self._reports.set_scale(microbatch, scale)

    def _scale(self, microbatch: int, items: Tensor | None, loss_scale: float) -> float | Tensor:
        """Return the factor of the loss of a micro-batch."""
        if items is not None:
            return items * loss_scale
        share = self._weights[microbatch] / sum(self._weights)
        return share / self._module.trainer.accumulate_grad_batches * loss_scale

    def _check_uncrossed(self, stage: int, received: StageTensors | None) -> None:
        """Allow evaluation steps that do not call the module on any stage: these have nothing to
        send.
        """
        if self._training is None and not (received and received.note):
            return
        raise PipelineError(
            f"{self._hook} returned on stage {stage} without calling the pipelined module. Call it "
            "exactly once in every training step, and in other steps on every stage or on none."
        )

    def _finish(self, microbatch: int, output: Any) -> Tensor | None:
        """Keep what a step returned; return the weighted loss if there is a backward."""
        self.outputs[microbatch] = tree_map_only(Tensor, Tensor.detach, output)
        batch = self._microbatches[microbatch]
        skipped = output is None and self._training is not None
        # Batches to predict from have no labels to count.
        uncounted = skipped or self._hook == "predict_step"
        items = None if uncounted else num_items_of(self._module, batch, output)
        if items is not None:
            self._items[microbatch] = items
        if self._training is None or output is None:
            return None
        if isinstance(output, Mapping) and "loss" not in output:
            raise PipelineError(
                f"{self._hook} returned a dict with "
                f"{', '.join(map(repr, output)) or 'no entries'}; the loss is missing. "
                'Return {"loss": loss, ...}, or the loss itself.'
            )
        loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
        self._training.plan_watch.loss(loss)
        loss_scale = self._training.loss_scale
        scale = self._scale(microbatch, items, loss_scale)
        self._reports.set_scale(microbatch, scale)
        # The largest fp16 number is 65504.
        weighted = (loss if loss_scale == 1.0 else loss.float()) * scale
        # Of nothing that counts a loss is NaN, as of a part of a sequence without labels.
        return (
            weighted
            if items is None
            else torch.where(items == 0, torch.zeros_like(weighted), weighted)
        )

    @property
    def num_items(self) -> Tensor | None:
        """Sum of the items of the micro-batches, if the module counts them."""
        return torch.stack(list(self._items.values())).sum() if self._items else None

    @property
    def num_samples(self) -> int | None:
        """Samples of the batch, if known."""
        known = [size for size in self.sizes if size is not None]
        return sum(known) if len(known) == len(self.sizes) else None

    @property
    def item_weights(self) -> list[float | Tensor]:
        """Weight of each micro-batch in a mean over the batch: its items if the module counts them,
        else its samples.
        """
        return [self._items.get(index, weight) for index, weight in enumerate(self._weights)]

    def signature(self, microbatch: int) -> Any:
        """Return names, shapes and dtypes of the micro-batch: equal ones give equal outputs of the
        stages.
        """
        return microbatch if self._variable_shapes else self._signatures[microbatch]

    @contextmanager
    def recomputing(self, stage: int, microbatch: int) -> Iterator[None]:
        """Around a backward, which may recompute the forward of a stage."""
        crossing = self._crossing
        self._reports.begin(microbatch)
        own = nullcontext() if crossing is None else crossing.recomputing(stage, microbatch)
        with self._around_backward(), own:
            yield

    def completing(self, stage: int) -> AbstractContextManager[None]:
        """Mark the stage's gradients as complete at exit; their reduction starts."""
        return (
            nullcontext()
            if self._training is None
            else self._training.accumulation.completing([stage])
        )
