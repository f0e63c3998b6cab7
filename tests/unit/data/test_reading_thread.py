"""A loader that reads ahead in a thread: equal batches, errors, and no thread left behind."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from megatron_lightning.data.order.reading_thread import ReadingThreadLoader


class Numbers(Dataset[int]):
    """Numbers, with the thread of every read."""

    def __init__(self, size: int, fails_at: int | None = None) -> None:
        self.size, self.fails_at = size, fails_at
        self.threads: list[str] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if index == self.fails_at:
            raise ValueError(f"number {index} is damaged")
        self.threads.append(threading.current_thread().name)
        return index


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def _num_readers() -> int:
    return sum(thread.name.startswith("reading") for thread in threading.enumerate())


@pytest.mark.parametrize(("size", "drop_last"), [(10, False), (10, True), (1, True), (0, False)])
def test_batches_and_random_states_are_those_without_a_thread(size: int, drop_last: bool) -> None:
    results = []
    for kind in (DataLoader, ReadingThreadLoader):
        torch.manual_seed(3)
        loader: Any = kind(torch.arange(size), batch_size=4, drop_last=drop_last)
        results.append([batch.tolist() for _ in range(2) for batch in loader])
        results[-1].append(torch.get_rng_state().tolist())
    assert results[0] == results[1]
    _until(lambda: _num_readers() == 0)


def test_the_first_batch_is_read_in_the_calling_thread_and_two_ahead() -> None:
    data = Numbers(20)
    batches = iter(ReadingThreadLoader(data, batch_size=2))
    assert data.threads == []
    next(batches)
    _until(lambda: len(data.threads) == 6)
    assert data.threads == 2 * ["MainThread"] + 4 * ["reading_0"]
    next(batches)
    _until(lambda: len(data.threads) == 8)
    time.sleep(0.05)
    assert len(data.threads) == 8  # and never further
    del batches  # as by a break
    _until(lambda: _num_readers() == 0)
    assert len(data.threads) == 8


@pytest.mark.parametrize("fails_at", [0, 5])
def test_an_error_comes_with_its_traceback_in_place_of_the_batch(fails_at: int) -> None:
    batches = iter(ReadingThreadLoader(Numbers(20, fails_at), batch_size=2))
    for number in range(fails_at // 2):
        assert next(batches).tolist() == [2 * number, 2 * number + 1]
    with pytest.raises(ValueError, match=f"number {fails_at} is damaged") as caught:
        next(batches)
    assert "__getitem__" in "".join(traceback.format_tb(caught.value.__traceback__))
    _until(lambda: _num_readers() == 0)
    with pytest.raises(StopIteration):
        next(batches)


def test_a_stuck_read_does_not_delay_an_error_of_the_step() -> None:
    released = threading.Event()

    class Stuck(Numbers):
        def __getitem__(self, index: int) -> int:
            assert index < 2 or released.wait(20)
            return index

    def fail() -> None:
        for _ in ReadingThreadLoader(Stuck(20), batch_size=2):
            raise RuntimeError("of the step")

    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="of the step") as caught:
        fail()
    del caught
    assert time.monotonic() - begin < 5
    released.set()
    _until(lambda: _num_readers() == 0)
