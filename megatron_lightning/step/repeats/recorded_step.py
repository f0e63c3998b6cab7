"""Inputs of the current optimizer step, to run the step again before its update.

The inputs are the batches of the step, the random states and buffers before each batch, and the
weights, which no step changes before its update. Recording costs no copy of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from megatron_lightning.assembly.buffers.buffer_watch import BufferPlaces, BufferWatch
from megatron_lightning.parallel.random.replica_rng import ReplicaRng
from megatron_lightning.step.participant import StepBatch, StepParticipant
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.step_run import StepRun

HELD_BYTES = 64 << 20
"""Most bytes of earlier batches of a step that a rank holds for a rerun."""


class BatchInputs:
    """Inputs and losses of one batch of a step."""

    def __init__(self, batch: StepBatch, states: Any, buffers: Mapping[str, Tensor]) -> None:
        # Steps may take entries out of a dict.
        self.batch = tree_map(lambda leaf: leaf, batch.value)
        self.indices = batch.indices
        self.states = states
        self.buffers = dict(buffers)
        self.versions = versions(self.batch)
        self.losses: list[Tensor] = []
        """Losses of the micro-batches, on the last stage."""
        leaves = tree_leaves(self.batch)
        self.nbytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        """Bytes of the batch."""


class RecordedStep(StepParticipant):
    """Record the inputs of the current optimizer step.

    Args:
        scope: The run context.
    """

    def __init__(self, scope: RunContext) -> None:
        self._scope = scope
        self._rng = ReplicaRng(scope.context.device)
        self._places = BufferPlaces(scope.module, lambda name: True)
        self._watch = BufferWatch()
        self._written: set[str] = set(self._places.current())  # all, before the first step
        self._late: set[str] = set()
        self._num_batches = 0
        self._left: dict[str, Tensor] = {}  # from before a step that the fit has not ended
        self.batches: list[BatchInputs] = []
        """Batches of the step, in order."""
        self.is_complete = False
        """Whether the gradients of the step are complete, and not yet used."""
        self.dropped_bytes = 0
        """Bytes of batches that were too large to hold. 0: all are held."""

    def begin_batch(self, batch: StepBatch) -> None:
        """Record the inputs of a training batch, after buffers and weights are shared."""
        if not batch.trains:
            return
        if self.is_complete or not self._scope.module.automatic_optimization:
            self.clear()
        if not self._scope.module.automatic_optimization:
            return
        num_bytes = sum(inputs.nbytes for inputs in self.batches)
        if num_bytes > HELD_BYTES:
            self.dropped_bytes = max(self.dropped_bytes, num_bytes)
            self.batches.clear()
        if not self.dropped_bytes:
            self.batches.append(BatchInputs(batch, self.states(), self._buffers()))

    def _buffers(self) -> dict[str, Tensor]:
        """Return copies of the buffers that steps write. Before the first step: of all buffers."""
        self._num_batches += 1
        if self._num_batches & (self._num_batches - 1) == 0:
            written_names = set(self._watch.written(self._places.current()))
            if self._num_batches == 2:
                self._written = written_names
            elif self._num_batches > 2:
                self._written |= written_names
        current = self._places.current()
        buffers = {
            name: buffer for name in self._written if (buffer := current.get(name)) is not None
        }
        return {name: buffer.clone() for name, buffer in buffers.items()}

    def late_buffers(self) -> list[str]:
        """Return the buffers without a copy from before the step, written since the last look. The
        buffers are copied from the next step on.
        """
        self._late |= set(self._watch.written(self._places.current())) - self._written
        return sorted(self._late)

    def restore(self, inputs: BatchInputs) -> None:
        """Set the random states and buffers before a batch."""
        self.restore_states(inputs.states)
        self.fill(inputs.buffers)

    def buffers_now(self) -> dict[str, Tensor]:
        """Return copies of all buffers, as they are after the first run."""
        current = self._places.current()
        return {name: buffer.clone() for name, buffer in current.items() if buffer is not None}

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Write values into buffers, by name."""
        current = self._places.current()
        with torch.no_grad():
            for name, value in values.items():
                buffer = current.get(name)
                if buffer is not None and buffer.shape == value.shape:
                    buffer.copy_(value)

    @contextmanager
    def before_step(self) -> Iterator[None]:
        """Set the buffers from before the first batch of the step in the block, as far as the step
        is held.
        """
        buffers = self.batches[0].buffers if self.batches else self._left
        places = self._places.current()
        now = {name: now.clone() for name in buffers if (now := places.get(name)) is not None}
        self.fill(buffers)
        try:
            yield
        finally:
            self.fill(now)

    def states(self) -> Any:
        """Return all random states."""
        return self._rng.everything(), self._scope.context.rng.state_dict()

    def restore_states(self, states: Any) -> None:
        """Set all random states."""
        drawn, streams = states
        self._rng.restore(drawn)
        self._scope.context.rng.load_state_dict(streams)

    def returned(self, run: StepRun, microbatch: int, loss: Tensor | None) -> None:
        """Record the loss of a micro-batch."""
        if self.batches and loss is not None:
            self.batches[-1].losses.append(loss.detach())

    def complete(self) -> None:
        """Mark the gradients of the step as complete."""
        self.is_complete = True

    def clear(self) -> None:
        """Forget the step."""
        self.batches.clear()
        self._left = {}
        self.is_complete = False
        self.dropped_bytes = 0
        self._written |= self._late
        self._late.clear()

    def end_batch(self, batch: StepBatch, output: Any) -> None:
        """Forget a batch that Lightning skips, because its step returned None."""
        if batch.trains and output is None and self.batches:
            self.batches.pop()

    def after_update(self, *, stepped: bool) -> None:
        """Forget the step, since its weights have changed."""
        self.clear()

    def end_training(self) -> None:
        """Forget the step. A save behind the fit still finds the buffers from before the step."""
        left = self.batches[0].buffers if self.batches else {}
        self.clear()
        self._left = left


def versions(batch: Any) -> list[int]:
    """Return the version counters of the tensors of a batch."""
    return [
        leaf._version
        for leaf in tree_leaves(batch)
        if isinstance(leaf, Tensor) and not leaf.is_inference()
    ]
