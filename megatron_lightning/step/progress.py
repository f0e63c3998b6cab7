"""Counts of samples and steps. The position in the data follows from the counts, also after a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_lightning.data.order.skipped import SkippedSamples


@dataclass
class Progress:
    """Counts of a strategy over its runs. Pickled with the strategy, and saved in checkpoints."""

    consumed_samples: int = 0
    """Samples trained on by all data-parallel ranks together, including samples of skipped steps.
    """
    skipped_steps: int = 0
    """Optimizer steps skipped because of infinite or NaN gradients."""
    skipped: SkippedSamples = field(default_factory=SkippedSamples)
    """Samples passed over by training. Skipped samples count as consumed."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """The run of this fit: id, folder and loggers, the same on all ranks. Empty before a fit."""
    fired: dict[str, int] = field(default_factory=dict)
    """Findings by guard, on this rank."""
    _batch: int = -1  # the batch counted last
    _updating: int = -1  # step from which the last update of the weights began

    def begin(self) -> None:
        """Begin to train. The next batch counts as new, whatever its number."""
        self._batch = -1

    def count(self, batch: int, num_samples: int) -> bool:
        """Count the samples of a training batch over all ranks. Return whether this batch is new.

        An optimizer with a line search runs the step several times with the same batch.
        """
        if batch == self._batch:
            return False
        self._batch = batch
        self.consumed_samples = self.skipped.after(self.consumed_samples, num_samples)
        return True

    def begin_update(self, step: int) -> None:
        """Record the beginning of an optimizer step."""
        self._updating = step

    def is_updating(self, step: int) -> bool:
        """Whether an optimizer step has begun but is not yet counted by the Trainer: weights are of
        this step or of the next.
        """
        return self._updating == step
