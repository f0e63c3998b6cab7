"""Lightning's own step: a single stage, the whole batch as a single micro-batch, backward in
Lightning's hook.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.pipeline.batch.microbatches import batch_size_of
from megatron_lightning.step.step_run import StepRun
from megatron_lightning.strategies.step.step_runner import StepRunner


class NativeStepRunner(StepRunner):
    """Run batches as Lightning does on one device. Gradients are reduced in backward."""

    _last_run: StepRun | None = None  # its backward may follow
    _items: Tensor | None = None  # of the batch, if the module counts items and the sum matters

    def training_step(self, batch: Any, *indices: Any) -> Any:
        """See the base class."""
        self.training.guard.leave()  # between batches of one optimizer step
        begun = self._begin_training(batch, indices, batch_size_of(batch) or 1)
        output = self._train(batch, indices)
        self.participants.end_batch(begun, output)
        return output

    def _train(self, batch: Any, indices: tuple[Any, ...]) -> Any:
        """Run the forward of a training batch. Return the step's output."""
        module = self._scope.module
        run = self._last_run = self._new_run("training_step", batch, indices)
        self.training.follow_clearing()
        output = self._forward(run)
        self.training.guard.leave()
        sums = module.trainer.accumulate_grad_batches > 1 or self._scope.context.dp_cp.size > 1
        if sums and module.automatic_optimization:
            run.count(0, output)
        self._items = run.num_items
        if module.automatic_optimization:
            self.participants.returned(run, 0, _loss_of(output))
        self._end(run)
        return output

    def repeat(self, batch: Any, indices: tuple[Any, ...]) -> None:
        """See the base class. Lightning divides the loss by the accumulated batches."""
        module, precision = self._scope.module, self._scope.precision
        loss = _loss_of(self._train(batch, indices))
        if loss is not None:
            loss = precision.pre_backward(loss / module.trainer.accumulate_grad_batches, module)
            self.backward(loss, None)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients. The loss is weighted by its items if the module counts items."""
        module, accumulation = self._scope.module, self.training.accumulation
        if not module.automatic_optimization and self._last_run is not None:
            self.participants.returned(self._last_run, 0, loss)
        self.training.begin_run(clear=False, keep_earlier=not module.automatic_optimization)
        with accumulation.completing():
            if self._items is not None:
                accumulation.add_items(self._items)
                loss = loss * (self._items * module.trainer.accumulate_grad_batches)
            self._scope.precision.backward(loss, module, *args, **kwargs)
        self.training.end_backwards()

    def evaluate(self, hook: str, batch: Any, *indices: Any) -> Any:
        """See the base class."""
        begun = self._begin_evaluated(hook, batch, indices)
        run = self._new_run(hook, batch, indices)
        run.outputs[0] = output = self._forward(run)
        self._end(run)
        self.participants.end_batch(begun, output)
        return output

    def run_pipeline(self, fn: Callable[[Any], Any], batch: Any) -> Any:
        """Return ``fn(batch)``."""
        units = self._scope.part.units
        if units is None or torch.is_grad_enabled():
            return fn(batch)
        # Not every step has the same forwards without gradients, such as old scores of a policy.
        with units.in_order(f"{getattr(fn, '__qualname__', '')} without gradients"):
            return fn(batch)

    def _new_run(self, hook: str, batch: Any, indices: tuple[Any, ...]) -> StepRun:
        module = self._scope.module
        # Lightning calls backward, so the run itself has no backward.
        return StepRun(module, hook, getattr(module, hook), [batch], indices, trains=False)

    def _forward(self, run: StepRun) -> Any:
        """Return the output of the user's step on the whole batch."""
        [batch] = run.microbatches
        self.participants.begin(run)
        with self.participants.around(run), self.participants.around_forward(run, 0, 0):
            return run.call(batch, *run.indices)

    def _end(self, run: StepRun) -> None:
        self.participants.end(run)
        self.participants.apply(run, self.participants.share(run))


def _loss_of(output: Any) -> Tensor | None:
    """Return the loss in a training step's output. None: the step returned None."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None
