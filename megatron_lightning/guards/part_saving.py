"""Verdict on exports of a rank's part of the model as if it were the full model.

The module carries the watch (``assembly/state/saving_guard.py``), since ``save_pretrained`` of a
full state must write on one rank alone, with this guard or without.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_lightning.guards.guard import Guard
from megatron_lightning.step.judge import Judge


class PartSaving(Guard):
    """Name and verdict. The module itself asks."""

    sentence = (
        "`save_pretrained`, `to_onnx` or `state_dict` of a module is about to give the part of the "
        "model that a rank holds. `state_dict` only warns"
    )
    may_warn = False


class PartWarning:
    """Warning about ``state_dict()`` of a part, given once.

    Args:
        judge: Gives the warning. None: the user has passed the guard.
        is_internal: Whether Lightning or this package asks, or a checkpoint is made.
    """

    def __init__(self, judge: Judge | None, is_internal: Callable[[], bool]) -> None:
        self._judge = judge
        self._is_internal = is_internal
        self._given = False

    def __call__(self, path: str) -> None:
        """Warn the user, once."""
        if self._judge is None or self._given or self._is_internal():
            return
        self._given = True
        place = f"module.{path}" if path else "module"
        argument = place if path else ""
        self._judge.warn(
            f"{place}.state_dict() has the part of the model that this rank holds. To save the "
            f"model, write on every rank: state = trainer.strategy.full_state_dict({argument}), "
            "which is full on rank 0 and empty on the others; then, if trainer.is_global_zero: "
            "torch.save(state, path)."
        )
