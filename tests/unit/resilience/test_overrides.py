"""Methods replaced during a run, in copies and pickles of their owners."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from megatron_lightning.step.overrides import override


class Counts(pl.Callback):
    def __init__(self) -> None:
        self.num = 0

    def on_train_start(self, *_: Any) -> None:
        self.num += 1


def _twice(original: Callable[..., Any], *args: Any) -> None:
    original(*args)
    original(*args)


def test_copies_and_pickles_have_the_original_method() -> None:
    owner = Counts()
    with ExitStack() as undo:
        override(owner, "on_train_start", _twice, undo)
        override(owner, "on_train_start", _twice, undo)
        owner.on_train_start()
        assert owner.num == 4
        assert is_overridden("on_train_start", owner, parent=pl.Callback)
        for copied in (copy.deepcopy(owner), pickle.loads(pickle.dumps(owner))):
            copied.on_train_start()
            assert (copied.num, owner.num) == (5, 4)
    owner.on_train_start()
    assert owner.num == 5
    assert vars(owner) == {"num": 5}
