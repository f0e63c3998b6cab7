"""Counts of samples and steps, from which the position in the data follows, also after a
checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_lightning.data.skipped import SkippedSamples


@dataclass
class Progress:
    """Counts of one strategy over its runs; pickled with it, and saved in checkpoints."""

    consumed_samples: int = 0
    """Samples that all data-parallel ranks together have trained on, those of skipped steps
    included."""
    skipped_steps: int = 0
    """Optimizer steps that were skipped because a gradient was not finite."""
    skipped: SkippedSamples = field(default_factory=SkippedSamples)
    """Samples that training passes over; they are consumed."""
    _batch: int = -1  # the batch counted last
    _before_batch: int = 0  # samples consumed then
    _updating: int = -1  # step from which the last update of the weights began

    def begin(self) -> None:
        """Begin to train: the next batch has not been counted, whatever its number."""
        self._batch = -1

    def count(self, batch: int, num_samples: int) -> bool:
        """Count the samples of a training batch over all ranks; return whether this batch is a new
        one.

        An optimizer that searches along a line runs the step several times with the same batch.
        """
        if batch == self._batch:
            return False
        self._batch = batch
        self._before_batch = self.consumed_samples
        self.consumed_samples = self.skipped.after(self.consumed_samples, num_samples)
        return True

    def forget(self, batch: int) -> bool:
        """Take back the count of ``batch``, which was not trained on; return whether it was
        counted.
        """
        if batch != self._batch:
            return False
        self._batch = -1
        self.consumed_samples = self._before_batch
        return True

    def begin_update(self, step: int) -> None:
        """Record that an optimizer step begins."""
        self._updating = step

    def is_updating(self, step: int) -> bool:
        """Whether an optimizer step has begun that the Trainer has not counted: weights are of this
        step or of the next.
        """
        return self._updating == step
