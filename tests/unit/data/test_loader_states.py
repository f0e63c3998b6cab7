"""States of loaders as plain values: objects come back, of the loader's own package alone."""

from __future__ import annotations

import sys
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lightning.checkpoint.format.plain_state import dump_state, load_state
from megatron_lightning.errors import CheckpointError
from megatron_lightning.step.loaders.plain_objects import (
    equal_values,
    packages_of,
    packed,
    unpacked,
)
from megatron_lightning.step.loaders.saved_loader import saved_loader

OURS = {"tests"}


class Flexible(dict):  # type: ignore[type-arg]
    """A state with attributes."""


@dataclass
class Worker:
    position: int
    random: Any


@dataclass
class Made:
    size: int

    def __new__(cls, *_: Any) -> Made:
        raise AssertionError("called")


class Loader:
    def save_state_rank(self) -> Worker:
        return Worker(0, None)


def test_objects_come_back_through_a_checkpoint() -> None:
    state = Flexible(worker=Worker(3, (1, np.arange(4, dtype=np.uint32))), others=[None, 2.5])
    state.seed = 7  # type: ignore[attr-defined]
    plain = load_state(dump_state({"loader": packed(state, OURS)}), "a test")["loader"]
    found = unpacked(plain, OURS)
    assert type(found) is Flexible and vars(found) == {"seed": 7} and found["others"] == [None, 2.5]
    assert type(found["worker"]) is Worker and found["worker"].position == 3
    number, array = found["worker"].random
    assert number == 1 and array.dtype == np.uint32 and array.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("subprocess:Popen", "the loader is of the package tests"),
        # What a module of the package imports is not of the package.
        (f"{__name__}:pytest.ExceptionInfo", "ExceptionInfo of the package _pytest"),
        ("tests.helpers.never_imported:State", "has not imported tests.helpers.never_imported"),
        (f"{__name__}:Missing", "Install the version that saved it"),
        (f"{__name__}:test_objects_come_back_through_a_checkpoint", "holds no state"),
    ],
)
def test_other_objects_are_refused(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        unpacked({"_class": name, "_fields": {}}, OURS)


def test_no_constructor_is_called() -> None:
    assert vars(unpacked({"_class": f"{__name__}:Made", "_fields": {"size": 2}}, OURS)) == {
        "size": 2
    }


def test_a_state_that_could_not_be_restored_is_not_saved() -> None:
    for state in (defaultdict(int, a=1), Flexible(inner=OrderedDict())):
        with pytest.raises(
            CheckpointError, match=r"of the package collections.* is of the package"
        ):
            packed([state], OURS)

    @dataclass
    class Local:
        position: int

    with pytest.raises(CheckpointError, match="or move a class inside of a function"):
        packed(Local(1), OURS)


def test_a_subclass_restores_the_states_of_its_base() -> None:
    loader = type("Mine", (Loader,), {"__module__": "my_package.loaders"})()
    assert packages_of(loader) == {"my_package", "tests"}


def test_keys_of_a_state_are_not_taken_for_marks() -> None:
    state = {"_class": "a word", "inner": [{"_array": 1}, {"_plain": {"_fields": Worker(1, 2)}}]}
    plain = load_state(dump_state({"loader": packed(state, OURS)}), "a test")["loader"]
    assert unpacked(plain, OURS) == state


def test_a_class_of_the_program_in_a_spawned_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is ``__mp_main__`` in a spawned process and ``__main__`` elsewhere."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules[__name__])
    monkeypatch.setattr(Worker, "__module__", "__mp_main__")
    loader = type("Mine", (), {"__module__": "__mp_main__"})()
    plain = packed(Worker(4, None), packages_of(loader))
    assert plain["_class"] == "__main__:Worker"
    monkeypatch.setattr(Worker, "__module__", "__main__")
    loader = type("Mine", (), {"__module__": "__main__"})()
    assert unpacked(plain, packages_of(loader)) == Worker(4, None)


class Counting:
    """A loader without a length that writes into the tensors of its state."""

    def __init__(self) -> None:
        self.places = {"tensor": torch.zeros(1), "array": np.zeros(1)}

    def __iter__(self) -> Iterator[int]:
        for number in range(9):
            for place in self.places.values():
                place[0] = number + 1
            yield number

    def state_dict(self) -> dict[str, Any]:
        return self.places

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.places = state


class CountingByRank(Counting):
    def save_state_rank(self) -> dict[str, Any]:
        return self.places

    def restore_state_rank(self, state: dict[str, Any]) -> None:
        self.places = state

    state_dict = load_state_dict = None  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Counting, CountingByRank])
def test_a_state_is_of_its_batch_whatever_the_loader_writes(kind: type[Counting]) -> None:
    loader = saved_loader(kind())
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    resumed = kind()
    saved_loader(resumed).load_state_dict(loader.state_dict())
    assert [float(place[0]) for place in resumed.places.values()] == [2, 2]


def test_equal_values() -> None:
    assert equal_values({"a": [torch.ones(2), 1]}, {"a": [torch.ones(2), 1]})
    for other in ({"a": [torch.zeros(2), 1]}, {"a": [torch.ones(2)]}, {"b": []}, UserDict(), None):
        assert not equal_values({"a": [torch.ones(2), 1]}, other)
