"""Kept texts of a scheduler with few slots: what is dropped, what is shared, what is counted."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from megatron_lightning.inference.engine.keys.key_slots import Allocator, Pages, Runs
from megatron_lightning.inference.engine.keys.prefix_cache import PrefixCounts
from megatron_lightning.inference.engine.request_batch import Request
from megatron_lightning.inference.engine.scheduler import Scheduler
from megatron_lightning.inference.engine.uncached_loop import Sampling


def request_of(tokens: Iterable[int], num_new: int = 4) -> Request:
    return Request(list(tokens), Sampling(max_new_tokens=num_new), torch.Generator(), 4096)


def scheduler_of(allocator: Allocator, *, keeps: bool = True) -> tuple[Scheduler, PrefixCounts]:
    counts = PrefixCounts()
    return Scheduler(
        allocator, max_tokens=2048, max_requests=8, keeps_prefixes=keeps, prefix_counts=counts
    ), counts


def step(scheduler: Scheduler) -> None:
    batch = scheduler.plan(0)
    scheduler.finish(batch, [(7.0, -1.0, -1.0)] * batch.num_kept)


def finish(scheduler: Scheduler, *requests: Request) -> None:
    """Run the requests one after another."""
    for request in requests:
        scheduler.add(request)
        while scheduler.num_requests:
            step(scheduler)


@pytest.mark.parametrize("allocator", [Runs(1 + 1500), Pages(16 * 82, 16)])
def test_a_request_that_cannot_start_drops_no_text(allocator: Allocator) -> None:
    scheduler, counts = scheduler_of(allocator)
    finish(scheduler, request_of(range(200)))
    scheduler.add(request_of(range(1000, 1500), 500))
    step(scheduler)
    waiting = request_of(range(3000, 3800), 400)
    scheduler.add(waiting)
    step(scheduler)
    assert not waiting.has_started
    scheduler.abort(waiting)
    scheduler.add(request_of([*range(200), 5, 6]))
    step(scheduler)
    assert counts.reused == 200


def test_only_as_many_texts_as_needed_are_dropped() -> None:
    """A gap arises between the texts of two others."""
    scheduler, counts = scheduler_of(Runs(1 + 3 * 103))
    texts = [range(first, first + 100) for first in (0, 1000, 2000)]
    finish(scheduler, *map(request_of, texts))
    finish(scheduler, request_of(range(3000, 3100)))  # in place of the first text
    assert not counts.reused
    finish(scheduler, request_of([*texts[2], 5]))
    assert counts.reused == 100


def test_pages_of_a_kept_text_are_not_needed_again() -> None:
    scheduler, counts = scheduler_of(Pages(16 * 82, 16))
    finish(scheduler, request_of(range(800)), request_of([*range(800), 5, 6]))
    assert counts.reused == 800
    finish(scheduler, request_of([*range(800), 8, 9], 480))  # 80 of 81 pages
    assert counts.reused == 1600


@pytest.mark.parametrize("allocator", [Runs(1 + 400), Pages(16 * 26, 16)])
def test_a_text_in_the_way_is_computed_again(allocator: Allocator) -> None:
    """Three quarters of the slots are kept for a text that a long one shares little of."""
    scheduler, counts = scheduler_of(allocator)
    request = request_of([*range(32), *range(1000, 1300)])
    finish(scheduler, request_of(range(300)), request)
    assert request.reason == "length" and not counts.reused


@pytest.mark.parametrize("allocator", [Runs(1 + 4000), Pages(16 * 250, 16)])
def test_turns_of_a_chat_are_kept_once(allocator: Allocator) -> None:
    scheduler, counts = scheduler_of(allocator)
    chat = list(range(100))
    for turn in range(5):
        request = request_of(chat, 20)
        finish(scheduler, request)
        chat = [*request.tokens, *range(500 + turn, 530 + turn)]
    assert counts.reused == sum(119 + 50 * turn for turn in range(4))
    assert [len(text.tokens) for text in scheduler.prefixes._texts] == [319]


def test_counts_are_of_looked_up_prompts() -> None:
    scheduler, counts = scheduler_of(Pages(16 * 82, 16), keeps=False)
    finish(scheduler, request_of(range(100)))
    assert counts == PrefixCounts()
    scheduler, counts = scheduler_of(Pages(16 * 82, 16))
    leader, follower = request_of(range(100), 40), request_of(range(100), 40)
    follower.leader = leader
    leader.num_common = follower.num_common = 100
    scheduler.add(leader)
    scheduler.add(follower)
    for _ in range(3):
        step(scheduler)
        scheduler.restart()  # keys of new weights
    while scheduler.num_requests:
        step(scheduler)
    assert counts == PrefixCounts(tokens=100)
