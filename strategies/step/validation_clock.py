"""A common clock for ``Trainer(val_check_interval={"minutes": 30})``.

On every rank, Lightning asks the rank's own clock whether a validation is due. Ranks a moment ahead
would validate while other ranks train on, and all ranks would wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import lightning.pytorch as pl

from megatron_lightning.lightning_internals.loops import (
    seconds_between_validations,
    set_validated_at,
    validated_at,
)

_NOT_DUE, _DUE = float("inf"), float("-inf")


class ValidationClock:
    """Decides on rank 0 whether validation follows a training batch, and gives the Trainer times
    with the same outcome.

    Args:
        broadcast: Returns rank 0's value on every rank.
    """

    def __init__(self, broadcast: Callable[[bool], bool]) -> None:
        self._broadcast = broadcast
        self._last = 0.0

    def agree(self, trainer: pl.Trainer) -> None:
        """Agree on the work after this batch. All ranks call this together. Costs nothing
        without a time interval.
        """
        interval = seconds_between_validations(trainer)
        if interval is None or trainer.world_size == 1:
            return
        last = validated_at(trainer)
        if last not in (_NOT_DUE, _DUE):  # set again when training starts and after each validation
            self._last = last
        is_due = self._broadcast(time.monotonic() - self._last >= interval)
        set_validated_at(trainer, _DUE if is_due else _NOT_DUE)
