"""Verdict on exports of a rank's part of the model as if it were the full model.

The module carries the watch (``assembly/state/saving_guard.py``), since ``save_pretrained`` of a
full state must write on one rank alone, with this guard or without.
"""

from __future__ import annotations

from megatron_lightning.guards.guard import Guard


class PartSaving(Guard):
    """Name and verdict. The module itself asks."""

    sentence = (
        "`save_pretrained`, `to_onnx` or `state_dict` of a module is about to give the part of the "
        "model that a rank holds. `state_dict` only warns"
    )
    may_warn = False
