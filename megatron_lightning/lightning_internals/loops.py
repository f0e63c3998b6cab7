"""The Trainer's loops: steps, epochs, validations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress


def is_accumulating(trainer: pl.Trainer) -> bool:
    """Whether the batch just run was not the last batch of an optimizer step."""
    return bool(trainer.fit_loop._should_accumulate())


def steps_nothing(optimizers: Sequence[object]) -> bool:
    """Whether ``configure_optimizers`` returned None."""
    return all(isinstance(optimizer, _MockOptimizer) for optimizer in optimizers)


def is_logging_step(trainer: pl.Trainer) -> bool:
    """Whether the loggers receive the values of the optimizer step about to end. Decided by the
    Trainer's ``log_every_n_steps`` alone, equal on every rank.
    """
    interval = int(vars(trainer)["log_every_n_steps"])  # set from another class
    return interval > 0 and num_logged_steps(trainer) % interval == 0


def num_logged_steps(trainer: pl.Trainer) -> int:
    """Return the loggers' count of steps over this fit and earlier fits, including the step about
    to end.
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped) + 1


def next_logged_step(trainer: pl.Trainer) -> int:
    """Return the step number of the first values logged by a starting fit.

    A save in the middle of an epoch has not counted the current step. The loop adds this step when
    the loop begins, or, of a save in a validation, where that validation would follow.
    """
    loop = trainer.fit_loop.epoch_loop
    repeats_validation = not loop._num_ready_batches_reached() and is_validation_due(trainer)
    is_uncounted = (
        loop.restarting
        and not loop._should_accumulate()
        and (loop.restarted_on_train_batch_end or not loop.restarted_on_last or repeats_validation)
    )
    return int(loop._batches_that_stepped) + is_uncounted


def skips_backward(trainer: pl.Trainer) -> bool:
    """Whether Lightning's loop leaves out backward, as StochasticWeightAveraging requests while
    counting for batch norm.
    """
    return bool(trainer.fit_loop._skip_backward)


def evaluation_batches(trainer: pl.Trainer) -> list[int | float]:
    """Return the number of batches in the validation, test or prediction about to begin: for each
    loader in turn, or a single number for loaders read side by side.
    """
    loop: Any = trainer._active_loop
    combined = loop._combined_loader
    if combined._mode == "sequential":
        return list(loop.max_batches)
    together = sized_len(combined)
    return [float("inf") if together is None else together]


def end_epoch(trainer: pl.Trainer) -> None:
    """Make a resumed epoch without remaining batches end, instead of reading further batches."""
    vars(trainer.fit_loop.epoch_loop.val_loop)["_has_run"] = True


def forget_restart(trainer: pl.Trainer) -> None:
    """Make the next epoch begin with its first batch. Lightning's loop forgets a restart in the
    first batch, and the resumed epoch may have none.
    """
    trainer.fit_loop.epoch_loop.restarting = False


def begin_epoch(trainer: pl.Trainer) -> None:
    """Make a resumed run between two epochs begin the next epoch as after an epoch of its own."""
    forget_restart(trainer)
    vars(trainer.fit_loop)["_resuming_from_checkpoint"] = False


def loop_state(loop: _Loop, prefix: str = "") -> dict[str, Any]:
    """Return ``loop.state_dict()``, whose copies take five times as long."""
    state: dict[str, Any] = {f"{prefix}state_dict": loop.on_save_checkpoint()}
    for name, value in vars(loop).items():
        if isinstance(value, _BaseProgress):
            state[f"{prefix}{name}"] = _counts(value)
        elif isinstance(value, _Loop):
            state |= loop_state(value, f"{prefix}{name}.")
    return state


def _counts(progress: _BaseProgress) -> dict[str, Any]:
    return {
        name: _counts(value) if isinstance(value, _BaseProgress) else value
        for name, value in vars(progress).items()
    }


def is_validation_due(trainer: pl.Trainer) -> bool:
    """Whether a validation follows the batch just run, apart from a validation that a run validates
    with because it stops early.
    """
    loop, stops_early = trainer.fit_loop, trainer.should_stop
    fetcher: Any = loop._data_fetcher
    trainer.should_stop = False
    try:
        return loop.epoch_loop._should_check_val_fx(fetcher)
    finally:
        trainer.should_stop = stops_early


def has_full_schedulers(trainer: pl.Trainer) -> bool:
    """Whether no step of a learning-rate scheduler is under way."""
    progress = trainer.fit_loop.epoch_loop.scheduler_progress.total
    return progress.ready == progress.completed


def seconds_between_validations(trainer: pl.Trainer) -> float | None:
    """Return ``val_check_interval`` if the interval is a time. None if the interval counts
    batches.
    """
    interval: float | None = getattr(trainer, "_val_check_time_interval", None)
    return interval


def validated_at(trainer: pl.Trainer) -> float:
    """Return the monotonic time of the last validation, or of the start of training. Lightning
    counts from this time to the next validation.

    Lightning's loops set the attribute. No class declares the attribute.
    """
    return float(vars(trainer)["_last_val_time"])


def set_validated_at(trainer: pl.Trainer, seconds: float) -> None:
    """Set the monotonic start time of Lightning's count to the next validation."""
    vars(trainer)["_last_val_time"] = seconds
