"""Values logged by hooks outside of the step, compared between the ranks of a replica.

A hook logging a norm of the weights, or a count kept by the last pipeline stage, logs a rank's own
value. Times and memory also differ between ranks without a fault. A difference is therefore only a
warning, given once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from megatron_lightning.step.overrides import override
from megatron_lightning.step.participant import StepBatch, StepParticipant
from megatron_lightning.step.run_context import RunContext

_NUM_EPOCHS = 2
"""Number of epochs with comparisons."""
_TOLERANCE = 1e-4
"""Relative. Copies trained by ranks differ in the last bits."""


class HookLogs(StepParticipant):
    """Compare the values logged by hooks at the end of the first epochs.

    Args:
        scope: The run context.
    """

    def __init__(self, scope: RunContext) -> None:
        self._groups = (scope.context.axis("tp-pp"), scope.context.cp)
        self._in_step = False
        self._values: dict[str, Any] = {}
        self._num_left = _NUM_EPOCHS
        override(scope.module, "log", self._log, scope.undo)

    def _log(
        self, original: Callable[..., Any], name: str, value: Any, *args: Any, **options: Any
    ) -> None:
        if self._num_left and not self._in_step and isinstance(value, int | float | Tensor):
            self._values[name] = value.detach() if isinstance(value, Tensor) else value
        original(name, value, *args, **options)

    def begin_batch(self, batch: StepBatch) -> None:
        """Compare the values logged since the last epoch began."""
        if batch.trains and batch.begins_loop:
            self._compare()
        self._in_step = True

    def end_batch(self, batch: StepBatch, output: Any) -> None:
        """Follow hooks again."""
        self._in_step = False

    def end_training(self) -> None:
        """Compare the values logged by hooks in the last epoch."""
        self._compare()

    def _compare(self) -> None:
        if not self._num_left:
            return
        values = {name: float(value) for name, value in self._values.items()}
        self._values.clear()
        names = {
            name
            for group in self._groups
            if group.size > 1
            for name in _differing(group.all_gather_object(values))
        }
        self._num_left -= bool(values)
        if names:
            self._num_left = 0
            listed = ", ".join(repr(name) for name in sorted(names)[:5])
            rank_zero_warn(
                f"hooks have logged {listed} with other values on ranks of one model replica, and "
                "loggers have those of rank 0. A statistic of weights is one of the rank's shards "
                "and layers: take it from strategy.full_tensors(), which all ranks call. A count "
                "outside of the module is kept by the last pipeline stage alone: make it an "
                "attribute of the LightningModule. Times and memory differ between ranks. See "
                "docs/differences.md."
            )


def _differing(ranks: list[Mapping[str, float]]) -> set[str]:
    first = ranks[0]
    return {
        name
        for values in ranks
        for name in values.keys() | first.keys()
        if not _is_close(values.get(name), first.get(name))
    }


def _is_close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:  # logged on rank 0 alone
        return True
    both_nan = math.isnan(one) and math.isnan(other)
    return both_nan or math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=1e-12)
