"""The point of a run where a checkpoint resumes: behind the last update of the weights.

A checkpoint holds no gradients. Saved inside of an accumulation, a batch or a validation, it
resumes at the last update, with the position in the data and the random numbers of that time.
Loaders and generators cannot step back, so the point is recorded after every update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor
from torch.utils._pytree import tree_map

from megatron_lightning.lightning_internals.loaders import is_reading
from megatron_lightning.lightning_internals.loops import (
    forget_restart,
    has_full_schedulers,
    is_accumulating,
    is_validation_due,
    loop_state,
)
from megatron_lightning.strategies.checkpoint.loop_progress import (
    await_validation,
    awaits_validation,
    reset_unfinished,
)
from megatron_lightning.strategies.step.loaders.dataloaders import (
    training_generators,
    training_samplers,
)


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """State of a run between two steps, apart from weights, optimizers and schedulers."""

    loops: dict[str, Any]
    """State of the fit loop, with this rank's states of the loaders."""
    epoch: int
    """Epochs completed."""
    num_batches: int
    """Batches trained on, over all epochs."""
    global_step: int
    """Optimizer steps."""
    samplers: list[dict[str, Any]]
    """Positions in the data."""
    generators: list[Tensor]
    """States of the generators of training loaders."""
    consumed_samples: int
    """Samples consumed, over all ranks."""
    skipped_steps: int
    """Optimizer steps skipped."""
    drawn: tuple[list[Tensor], list[Tensor]]
    """Random states of steps and of hooks."""
    drawn_on_host: tuple[Any, Any]
    """Random states of Python and NumPy."""
    streams: dict[str, Tensor]
    """Random states of layers."""
    step_size: dict[str, Any] | None
    """Global batch. None: unknown."""


class ResumePoints(pl.Callback):
    """Record the resume point of a fit after every update.

    The strategy adds this callback behind the user's: Lightning calls no strategy at the end of a
    batch or an epoch.

    Args:
        own_state: Returns counts and random states of this rank: the fields of a point from
            ``consumed_samples`` on.
    """

    def __init__(self, own_state: Callable[[pl.Trainer], dict[str, Any]]) -> None:
        self._own_state = own_state
        self._has_begun = False  # has done something after the start of the fit
        self._has_validated = False  # after the last update
        self._has_ended = False  # validates only because the run stops early
        self.loaded: dict[str, Any] = {}
        """Fields of a resumed run's point, until the run has begun."""
        self.last: ResumePoint | None = None
        """Point of the last update. None: no fit has begun."""

    # ---------------------------------------------------------------------------------------- hooks

    def begin(self, trainer: pl.Trainer) -> None:
        """Record the start of a fit, with the random states restored."""
        self._has_begun = self._has_validated = self._has_ended = False
        self.last = self._take(trainer)
        self.loaded = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Record the point behind an update."""
        if not is_accumulating(trainer):
            self.last = self._take(trainer)
            self._has_begun, self._has_validated = True, False

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Keep the point from before a validation that no resumed run repeats."""
        if self.last is not None and not trainer.sanity_checking:
            is_due = awaits_validation(self.last.loops)
            self._has_ended |= bool(trainer.should_stop) and not is_due

    def on_validation_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Take the validation as done: checkpoints of its metrics follow."""
        if not trainer.sanity_checking:
            self._has_begun = self._has_validated = True

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Record the point behind a validation inside of an epoch. At the end of an epoch callbacks
        still need the metrics, which no checkpoint holds: a resumed run validates again.
        """
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if self._is_between_steps(trainer) and not is_last:
            self.last = self._take(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Make the epoch behind a resumed epoch without batches begin at its first batch."""
        self._has_begun = True
        forget_restart(trainer)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Record the point behind a fit, unless the fit has ended inside of an epoch."""
        if self._is_between_steps(trainer):
            self.last = self._take(trainer)

    def begin_epoch(self, trainer: pl.Trainer) -> None:
        """Record the point before the hooks at the start of an epoch."""
        if self._has_begun:
            self.last = self._take(trainer)

    # ----------------------------------------------------------------------------------------- save

    def now(self, trainer: pl.Trainer) -> ResumePoint:
        """Return the point for a checkpoint saved now."""
        if self.last is None or self._is_between_steps(trainer):
            return self._take(trainer)
        return self.last

    def interrupted(self, trainer: pl.Trainer) -> ResumePoint | None:
        """Return the last point after an exception. None: the run goes on, or has just updated."""
        is_over = trainer.state.status == TrainerStatus.INTERRUPTED
        return self.last if is_over and not self._is_between_steps(trainer) else None

    def is_behind(self, trainer: pl.Trainer) -> bool:
        """Whether the run has begun a batch, or read one, behind the point for a checkpoint."""
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.total
        return (
            self.last is not None
            and batches.ready > self.last.num_batches
            and not self._is_between_steps(trainer)
        )

    def is_updating(self, trainer: pl.Trainer) -> bool:
        """Whether the weights are behind the point, since a batch has ended in an update or after
        it.
        """
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.total
        if self.last is None or batches.ready <= self.last.num_batches:
            return False
        has_updated = trainer.global_step > self.last.global_step
        return has_updated and (
            batches.processed < batches.ready or not has_full_schedulers(trainer)
        )

    def _is_between_steps(self, trainer: pl.Trainer) -> bool:
        """Whether a checkpoint holds the state of now. Otherwise it holds the last point."""
        last, loops = self.last, trainer.fit_loop
        if last is None or not is_reading(trainer):  # loaders have no state after a fit
            return False
        batches: Any = loops.epoch_loop.batch_progress.total
        epochs: Any = loops.epoch_progress.total
        is_behind_update = batches.processed == batches.ready and not is_accumulating(trainer)
        has_just_updated = batches.processed > last.num_batches
        if trainer.state.status == TrainerStatus.INTERRUPTED:
            # The exception may come from reading the next batch.
            return is_behind_update and has_just_updated
        # An epoch that ends without its last batch is resumed inside of the epoch.
        is_over = loops.epoch_loop.batch_progress.is_last_batch
        return (
            is_behind_update
            and (has_just_updated or self._has_begun)
            and (trainer.training or self._has_validated)
            and epochs.ready == epochs.started
            and (is_over or epochs.processed < epochs.ready)
            and not self._has_ended
        )

    def _take(self, trainer: pl.Trainer) -> ResumePoint:
        loop = trainer.fit_loop
        loops = loop_state(loop)
        batches: Any = loop.epoch_loop.batch_progress.total
        reset_unfinished(loops)
        is_at_batch_end = trainer.training and batches.processed > batches.completed
        if is_at_batch_end and is_validation_due(trainer):
            await_validation(loops)
        if self.last is not None and self.last.num_batches == batches.processed:
            # A loader that has ended since may begin its next pass when it is asked.
            loops["state_dict"] = self.last.loops["state_dict"]
        elif loops["state_dict"]:
            loops["state_dict"] = tree_map(copy_leaf, loops["state_dict"])
        point = ResumePoint(
            loops=loops,
            epoch=trainer.current_epoch,
            num_batches=batches.processed,
            global_step=trainer.global_step,
            samplers=[sampler.state_dict() for sampler in training_samplers(trainer)],
            generators=[one.get_state() for one in training_generators(trainer)],
            **self._own_state(trainer),
        )
        return replace(point, **self.loaded)


class EpochStartRecorder(pl.Callback):
    """Record the resume point at the start of an epoch, before the callbacks of the user.

    Args:
        points: Records.
    """

    def __init__(self, points: ResumePoints) -> None:
        self._points = points

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Record the point."""
        self._points.begin_epoch(trainer)


def copy_leaf(leaf: Any) -> Any:
    """Return a copy of an array or tensor that a loader may write into."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
