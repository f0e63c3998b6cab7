"""A run of the user's step on the micro-batches of a batch: outputs, and weights in means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron_lightning.errors import PipelineError
from megatron_lightning.pipeline.batch.microbatches import batch_size_of
from megatron_lightning.step.items import count_items, num_items_of


class StepRun:
    """A run of a step. Participants receive this object.

    Args:
        module: The LightningModule.
        hook: Name of the step, such as ``"training_step"``.
        call: Called with a micro-batch and ``indices``: as a rule, the step.
        microbatches: The parts of the batch.
        indices: Further arguments of the step.
        trains: Whether the run has backwards.
        loss_scale: Factor of the losses for fp16.
        last_stage: The stage on which the step runs to the end.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        hook: str,
        call: Callable[..., Any],
        microbatches: Sequence[Any],
        indices: tuple[Any, ...],
        *,
        trains: bool,
        loss_scale: float = 1.0,
        last_stage: int = 0,
    ) -> None:
        self.module = module
        self.hook = hook
        self.call = call
        self.microbatches = microbatches
        self.indices = indices
        self.trains = trains
        self.loss_scale = loss_scale
        self.last_stage = last_stage
        self.sizes = [batch_size_of(part) for part in microbatches]
        """Samples of the micro-batches, if known."""
        self.outputs: dict[int, Any] = {}
        """Detached outputs of the last stage by micro-batch."""
        self.facts: list[str] = []
        """Actions of the step on this rank, in words, for comparison between ranks sharing a
        sequence.
        """
        # Means weigh micro-batches by samples, or alike if any size is unknown.
        known_sizes = [float(size) for size in self.sizes if size]
        self._weights = (
            known_sizes if len(known_sizes) == len(self.sizes) else [1.0] * len(self.sizes)
        )
        self._items: dict[int, Tensor] = {}
        self._counted: dict[int, Tensor | None] = {}  # before the step, by the module's method

    def keep_output(self, microbatch: int, output: Any) -> Tensor | None:
        """Keep the output of the step, and count the items. Return the loss if a backward follows.

        Raises:
            PipelineError: If a training step returned a dict without a loss.
        """
        self.outputs[microbatch] = tree_map_only(Tensor, Tensor.detach, output)
        skipped = output is None and self.trains
        if not skipped and self.hook != "predict_step":  # batches to predict from have no labels
            self.count(microbatch, output)
        if not self.trains or output is None:
            return None
        if isinstance(output, Mapping) and "loss" not in output:
            raise PipelineError(
                f"{self.hook} returned a dict with "
                f"{', '.join(map(repr, output)) or 'no entries'}; the loss is missing. "
                'Return {"loss": loss, ...}, or the loss itself.'
            )
        loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
        return loss

    def count(self, microbatch: int, output: Any) -> None:
        """Count the items of a micro-batch, if the module counts items."""
        items = num_items_of(self.module, self.microbatches[microbatch], output)
        if items is not None:
            self._items[microbatch] = items

    def count_evaluated(self) -> None:
        """Count the items of an evaluation by Lightning's own step. Only reports need these
        items.
        """
        if self.hook in {"validation_step", "test_step"}:
            for microbatch, output in self.outputs.items():
                if microbatch not in self._items:
                    self.count(microbatch, output)

    def items(self, microbatch: int) -> Tensor | None:
        """Return the items of a micro-batch. None: nothing counts items.

        Before the step has returned, the module's method ``num_items(batch)`` counts.
        """
        if microbatch in self._items or microbatch in self.outputs:
            return self._items.get(microbatch)
        if microbatch not in self._counted:
            self._counted[microbatch] = count_items(self.module, self.microbatches[microbatch])
        return self._counted[microbatch]

    def scale(self, microbatch: int) -> float | Tensor:
        """Return the factor of the loss of a micro-batch."""
        items = self.items(microbatch)
        if items is not None:
            return items * self.loss_scale
        share = self._weights[microbatch] / sum(self._weights)
        return share / self.module.trainer.accumulate_grad_batches * self.loss_scale

    def weighted(self, microbatch: int, loss: Tensor) -> Tensor:
        """Return the loss at the beginning of a micro-batch's backward."""
        items = self.items(microbatch)
        # The largest fp16 number is 65504.
        weighted = (loss if self.loss_scale == 1.0 else loss.float()) * self.scale(microbatch)
        if items is None:
            return weighted
        # A loss over no counted items is NaN, as for a part of a sequence without labels.
        return torch.where(items == 0, torch.zeros_like(weighted), weighted)

    @property
    def num_items(self) -> Tensor | None:
        """Sum of the items of the micro-batches, if the module counts items."""
        return torch.stack(list(self._items.values())).sum() if self._items else None

    @property
    def num_samples(self) -> int | None:
        """Samples of the batch, if known."""
        known_sizes = [size for size in self.sizes if size is not None]
        return sum(known_sizes) if len(known_sizes) == len(self.sizes) else None

    @property
    def item_weights(self) -> list[float | Tensor]:
        """Weight of each micro-batch in a mean over the batch: number of items if the module counts
        items, else number of samples.
        """
        return [self._items.get(index, weight) for index, weight in enumerate(self._weights)]
