"""Progress of Lightning's loops in a checkpoint: where in an epoch a run is resumed.

Lightning counts the epochs and batches that are ready, started, processed and completed, in total
and in the current epoch. A save in ``on_train_batch_end`` has processed a batch and not completed
the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from enum import Enum
from typing import Any

Loops = MutableMapping[str, Any]
"""State of the fit loop in a checkpoint."""

_EPOCHS, _BATCHES = "epoch_progress", "epoch_loop.batch_progress"
_VALIDATION = "epoch_loop.val_loop.batch_progress"
_SCOPES = ("total", "current")
_STATE, _STEPPED = "epoch_loop.state_dict", "_batches_that_stepped"


class ResumePlace(Enum):
    """Where a run is resumed."""

    IN_EPOCH = "before a further batch of the epoch"
    END_OF_EPOCH = "behind the last batch of an epoch, before the hooks of its end"
    BETWEEN_EPOCHS = "behind the end of an epoch, or before the first epoch"


def place_of(loops: Mapping[str, Any]) -> ResumePlace:
    """Return the place of the run that saved ``loops``."""
    epochs, batches = loops.get(_EPOCHS, {}).get("current", {}), loops.get(_BATCHES, {})
    counts = batches.get("current", {})
    is_over = batches.get("is_last_batch", False)
    if is_over and epochs.get("processed") == epochs.get("ready"):
        return ResumePlace.BETWEEN_EPOCHS
    # An exception may end the last batch before its training.
    if is_over and counts.get("processed") == counts.get("ready"):
        return ResumePlace.END_OF_EPOCH
    return ResumePlace.IN_EPOCH


def has_begun(loops: Mapping[str, Any]) -> bool:
    """Whether the run has begun an epoch."""
    return bool(loops.get(_EPOCHS, {}).get("total", {}).get("started", 0))


def awaits_validation(loops: Mapping[str, Any]) -> bool:
    """Whether Lightning's loops will return to a validation before they train on."""
    total = loops.get(_VALIDATION, {}).get("total", {})
    return bool(total.get("started", 0) > total.get("processed", 0))


def await_validation(loops: Loops) -> None:
    """Make a run resumed from ``loops`` validate before it trains on.

    The batch is complete, and Lightning returns to a validation interrupted in the first step.
    """
    _complete(loops, _BATCHES)
    begun = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    loops[_VALIDATION] = {
        **loops[_VALIDATION],
        **{scope: dict(begun) for scope in _SCOPES},
        "is_last_batch": False,
    }


def reset_unfinished(loops: Loops) -> None:
    """Make a run resumed from ``loops`` start the epoch that was about to start, and return to no
    validation: a repeated validation counts its first batch twice.
    """
    epochs, batches = loops[_EPOCHS], loops[_VALIDATION]
    for scope in _SCOPES:
        epochs[scope]["ready"] = epochs[scope]["started"]
        batches[scope] = dict.fromkeys(batches[scope], batches[scope]["processed"])


def settle(loops: Loops) -> None:
    """Bring loops at the end of an epoch into the one form that every resumed run understands.

    Lightning's loops resume from the end of an epoch in several ways. Some of them leave out the
    hooks of the end, count an epoch twice, or train the next epoch as the same.
    """
    place = place_of(loops)
    if place is ResumePlace.BETWEEN_EPOCHS:
        _complete(loops, _EPOCHS)
        _complete(loops, _BATCHES)
    elif place is ResumePlace.END_OF_EPOCH and not awaits_validation(loops):
        _complete(loops, _BATCHES)
        state = loops.get(_STATE, {})
        loops[_STATE] = {**state, _STEPPED: state.get(_STEPPED, 0) + 1}


def _complete(loops: Loops, name: str) -> None:
    """Complete what has been processed."""
    progress = loops[name]
    scopes = {
        scope: {**progress[scope], "completed": progress[scope]["processed"]} for scope in _SCOPES
    }
    loops[name] = {**progress, **scopes}
