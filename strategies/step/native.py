"""Lightning's own step: one stage, the whole batch as one micro-batch, backward in Lightning's
hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from megatron_lightning.pipeline.batch.microbatches import batch_size_of
from megatron_lightning.strategies.step.items import num_items_of
from megatron_lightning.strategies.step.steps import Steps


class NativeSteps(Steps):
    """Run batches as Lightning does on one device; gradients are reduced in backward."""

    _items: Tensor | None = None  # of the batch, where the module counts them and their sum matters

    def training_step(self, batch: Any, *indices: Any) -> Any:
        """See the base class."""
        self._begin_training(batch, batch_size_of(batch) or 1)
        # The buffers of the step before are shared now: a graph that awaits its backward may hold
        # them.
        self.buffers.begin_batch(self._batches_of_epoch())
        self._hints.begin([batch])
        with self._recorded("training_step"):
            output = self._scope.module.training_step(batch, *indices)
        self._hints.end(output)
        self.training.guard.leave()
        self._items = self._num_items(batch, output)
        if self._scope.module.automatic_optimization:
            self.reports.follow(output.get("loss") if isinstance(output, Mapping) else output)
        self._log_reports("training_step", batch, self._items)
        return output

    @contextmanager
    def _recorded(self, hook: str) -> Iterator[None]:
        """Around a step, whose layers may report."""
        with self._in_hook(hook), self._units_in_order(hook), self.reports.recording(hook):
            yield

    def _log_reports(self, hook: str, batch: Any, items: Tensor | None) -> None:
        weight: float | Tensor = 1.0 if items is None else items
        self.reports.log(hook, [weight], items, batch_size_of(batch))

    def _num_items(self, batch: Any, output: Any) -> Tensor | None:
        """Return the items of a batch, if gradients are sums over several."""
        module = self._scope.module
        sums = module.trainer.accumulate_grad_batches > 1 or self._scope.context.dp_cp.size > 1
        return (
            num_items_of(module, batch, output) if sums and module.automatic_optimization else None
        )

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients; the loss is weighted by its items, where the module counts
        them.
        """
        training, accumulation = self.training, self.training.accumulation
        if not self._scope.module.automatic_optimization:
            self.reports.follow(loss)
        training.plan_watch.loss(loss)
        if training.watch is not None:
            training.watch.loss(loss)
        training.begin_run(clear=False, keep_earlier=not self._scope.module.automatic_optimization)
        with accumulation.completing():
            if self._items is not None:
                accumulation.add_items(self._items)
                loss = loss * (self._items * self._scope.module.trainer.accumulate_grad_batches)
            self._scope.precision.backward(loss, self._scope.module, *args, **kwargs)
        training.end_backwards()

    def evaluate(self, hook: str, batch: Any, *indices: Any) -> Any:
        """See the base class."""
        # The loader's index, if there are several.
        self._check_first_batch(batch, hook, *indices[1:])
        module = self._scope.module
        with self._recorded(hook):
            output = getattr(module, hook)(batch, *indices)
        if self.reports.exist and hook != "predict_step":  # which may have no labels to count
            self._log_reports(hook, batch, num_items_of(module, batch, output))
        return output

    def run_pipeline(self, fn: Callable[[Any], Any], batch: Any) -> Any:
        """Return ``fn(batch)``."""
        return fn(batch)
