"""What ``ModelCheckpoint`` callbacks call best and last, put right when a save fails and training goes on.

A callback takes a checkpoint for granted before it is written and pushes an older one out for it. When the save has failed, the
new one is struck from its lists, and what it pushed out, which is still there, is put back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor


class _Lists(NamedTuple):
    """What one callback remembers."""

    best: dict[str, Tensor]
    best_path: str
    last_path: str


class RememberedCheckpoints:
    """What the callbacks of a Trainer remember, as of the last save that was committed.

    Args:
        callbacks: Returns the Trainer's callbacks that save checkpoints.
    """

    def __init__(self, callbacks: Callable[[], list[Any]]) -> None:
        self._all_callbacks = callbacks
        self._committed: dict[ModelCheckpoint, _Lists] = {}
        self._pending: dict[ModelCheckpoint, _Lists] = {}
        self._put_back: set[str] = set()
        self._changed = False

    def start(self) -> None:
        """Take what callbacks remember now, of a run before, for committed."""
        self._committed = self._now()

    def begin(self, callback_states: dict[str, Any]) -> None:
        """Note what is remembered if the save that begins is committed; all saves before are settled.

        Args:
            callback_states: The callbacks' states that this save holds; corrected if they were collected before a failure of
                the save before was known.
        """
        self._pending = self._now()
        if self._changed:
            current = {callback.state_key: callback.state_dict() for callback in self._callbacks()}
            callback_states.update({key: state for key, state in current.items() if key in callback_states})
        self._changed = False

    def settle(self, path: str, *, committed: bool) -> None:
        """Take note of what became of the save to ``path``; called on every rank, between steps of the callbacks."""
        if committed:
            self._committed = self._pending
            return
        for callback in self._callbacks():
            self._revert(callback, path, self._committed.get(callback, _Lists({}, "", "")))
        self._changed = True

    def keeps(self, path: str) -> bool:
        """Return whether a checkpoint was put back: the failed one must not push it out."""
        named = {name for lists in self._now().values() for name in (*lists.best, lists.best_path, lists.last_path)}
        return path in self._put_back & named

    def _callbacks(self) -> list[ModelCheckpoint]:
        return [callback for callback in self._all_callbacks() if isinstance(callback, ModelCheckpoint)]

    def _now(self) -> dict[ModelCheckpoint, _Lists]:
        return {c: _Lists(dict(c.best_k_models), c.best_model_path, c.last_model_path) for c in self._callbacks()}

    def _revert(self, callback: ModelCheckpoint, path: str, before: _Lists) -> None:
        if path in callback.best_k_models:
            candidates = {**callback.best_k_models, **before.best}  # an older one of the same name is still there
            if path not in before.best:
                del candidates[path]
            _choose(callback, candidates)
        elif callback.best_model_path == path:
            callback.best_model_path = before.best_path
        if callback.last_model_path == path:
            callback.last_model_path = before.last_path
        self._put_back |= {*before.best, before.best_path, before.last_path}


def _choose(callback: ModelCheckpoint, candidates: dict[str, Tensor]) -> None:
    """Let a callback remember the best of the candidates."""
    highest = callback.mode == "max"
    ranked = sorted(candidates, key=lambda path: float(candidates[path]), reverse=highest)
    count = len(ranked) if callback.save_top_k == -1 else callback.save_top_k
    callback.best_k_models = {path: candidates[path] for path in ranked[:count]}
    full = len(callback.best_k_models) == callback.save_top_k
    callback.kth_best_model_path = ranked[count - 1] if full else ""
    callback.kth_value = candidates[ranked[count - 1]] if full else torch.tensor(-torch.inf if highest else torch.inf)
    callback.best_model_path = ranked[0] if ranked else ""
    callback.best_model_score = candidates[ranked[0]] if ranked else None


def checkpoint_callbacks(trainer: pl.Trainer | None) -> list[Any]:
    """Return the callbacks of a Trainer that save checkpoints; none without one."""
    return [] if trainer is None else list(trainer.checkpoint_callbacks)
