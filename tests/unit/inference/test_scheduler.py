"""Random requests on small caches: steps read keys and states of their own texts, lose no slot."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from megatron_lightning.inference.engine.keys import prefix_cache
from megatron_lightning.inference.engine.keys.key_slots import Beginning, Copies, Pages, Runs
from megatron_lightning.inference.engine.keys.prefix_cache import KeptText, PrefixCache
from megatron_lightning.inference.engine.request_batch import Batch, Portion, Request
from megatron_lightning.inference.engine.requests import RequestMaker
from megatron_lightning.inference.engine.scheduler import Scheduler
from megatron_lightning.inference.engine.uncached_loop import Sampling

STOP = 1
Result = tuple[float, float, float]


class Run:
    """A run of random requests, with a cache of (token, place) in place of keys.

    Keys of a longer text are others, as LongRoPE's.
    """

    def __init__(self, seed: int, storage: str, events: Counter[str]) -> None:
        self.random, self.events = random.Random(seed), events
        draw = self.random
        self.longest = draw.choice([8, 12, 24])
        has_states = draw.random() < 0.4
        self.num_drafts = 0 if has_states else draw.choice([0, 0, 1, 2])
        self.num_groups = draw.choice([1, 1, 2, 3])
        block = draw.choice([2, 3, 4])
        num_slots = draw.choice([1, 2, 6]) * self.longest + 2 * block
        self.allocator: Pages | Runs
        if storage == "pages":
            self.allocator = Pages(num_slots, block, has_states=has_states)
        else:
            self.allocator = Runs(num_slots, has_states=has_states)
        self.scheduler = Scheduler(
            self.allocator,
            max_tokens=draw.choice([5, 8, 20]),
            max_requests=draw.choice([2, 4, 5]),
            num_drafts=self.num_drafts,
            keeps_prefixes=not has_states and draw.random() < 0.7,
        )
        self.longest_short = draw.choice([None, None, 4, 7])
        self.keys: dict[int, tuple[int, int, bool]] = {}
        self.states: dict[int, list[int]] = {}
        """Row -> tokens read so far."""
        self.requests = [request for _ in range(draw.randint(1, 4)) for request in self.made()]

    def tokens(self, most: int) -> list[int]:
        return [self.random.randint(2, 9) for _ in range(self.random.randint(1, most))]

    def made(self) -> list[Request]:
        """Return scores after few contexts, or samples of few prompts."""
        draw = self.random
        maker = RequestMaker(
            longest=self.longest, longest_short=self.longest_short, stops=frozenset([STOP])
        )
        # Half of them begin with tokens that other texts begin with, too.
        begins = [*range(2, 8), *range(2, 8)] if draw.random() < 0.5 else []
        prompts = [[*begins, *self.tokens(self.longest + 3)] for _ in range(2)]
        if draw.random() < 0.5:
            contexts = [draw.choice(prompts) for _ in range(draw.randint(1, 5))]
            return maker.scored(contexts, [self.tokens(6) for _ in contexts])
        sampling = Sampling(max_new_tokens=draw.randint(1, self.longest + 4))
        rows = maker.samples(prompts, sampling, draw.randint(1, 4), None)
        return [request for row in rows for request in row]

    def finish_all(self) -> None:
        later = self.requests[8:]
        for request in self.requests[:8]:
            self.scheduler.add(request)
        self.scheduler.set_groups(self.num_groups)
        for _ in range(2000):
            batches = list[Batch]()
            if self.random.random() < 0.05:
                living = [r for r in self.requests if r.reason is None and r not in later]
                self.scheduler.abort(self.random.choice(living))
            elif later and self.random.random() < 0.3:
                self.scheduler.add(later.pop(0))
            for group in range(self.num_groups):
                batches.append(self.scheduler.plan(group))
                self.compute(batches[-1])
            for batch in batches:
                self.finish(batch)
            if not self.scheduler.num_requests:
                if not later:
                    return
                self.scheduler.add(later.pop(0))
        raise AssertionError("the requests do not end")

    def compute(self, batch: Batch) -> None:
        for source, target in batch.copies.slots:
            self.events["copies"] += 1
            for old, new in zip(
                range(source.start, source.stop), range(target.start, target.stop), strict=True
            ):
                self.keys[new] = self.keys[old]
        for before, behind in batch.copies.rows:
            self.events["state copies"] += 1
            self.states[behind] = self.states[before]
        texts = [
            (p.request.tokens[p.request.offset :] + list(p.drafts))[: p.end] for p in batch.portions
        ]
        for portion, text in zip(batch.portions, texts, strict=True):
            assert len(text) == portion.end and min(text) > 0
            self.events["slides"] += portion.first == 0 and portion.request.offset > 0
            slots = self.allocator.slots(portion.request, portion.first, portion.end).tolist()
            places = range(portion.first, portion.end)
            is_long = self.is_long(portion)
            self.events["long"] += is_long and not portion.first
            self.keys.update(
                (slot, (text[place], place, is_long))
                for slot, place in zip(slots, places, strict=True)
            )
        for portion, text in zip(batch.portions, texts, strict=True):
            slots = self.allocator.slots(portion.request, 0, portion.end).tolist()
            read = [self.keys[slot] for slot in slots]
            is_long = self.is_long(portion)
            assert read == [(token, place, is_long) for place, token in enumerate(text)]
            row = self.allocator.row(portion.request)
            if portion.first and self.allocator.has_states:
                assert self.states[row] == text[: portion.first]
            self.states[row] = text

    def is_long(self, portion: Portion) -> bool:
        """Return whether the text with its drafts has the keys of longer texts."""
        length = max(portion.end, portion.request.num_inputs)
        return self.longest_short is not None and length > self.longest_short

    def finish(self, batch: Batch) -> None:
        results, drafts = list[Result](), list[list[int]]()
        for portion in batch.portions:
            results += self.results(portion)
            unused = portion.request.num_scored > 0
            drafts.append([-1 if unused else self.tokens(1)[0] for _ in range(self.num_drafts)])
        self.scheduler.finish(batch, results, drafts if self.num_drafts else ())

    def results(self, portion: Portion) -> list[Result]:
        """Return random tokens. Some are equal to the drafts, and few end the text."""
        results, follows_text = list[Result](), True
        for place in portion.kept:
            index = place + 1 - (portion.end - len(portion.drafts))
            token = STOP if self.random.random() < 0.05 else self.tokens(1)[0]
            if 0 <= index < len(portion.drafts) and self.random.random() < 0.6:
                token = portion.drafts[index]
            if portion.request.num_scored:
                token = 2
            elif not follows_text:
                token = -1
            results.append((token, 0.0, 0.0))
            follows_text = follows_text and portion.takes(place + 1, token)
        return results


@pytest.mark.spread(1)
@pytest.mark.parametrize("storage", ["runs", "pages"])
def test_steps_read_the_keys_of_their_texts(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaders and followers are scored, sampled, aborted, give way, and slide, with drafts too."""
    events, pause = Counter[str](), Scheduler._pause
    monkeypatch.setattr(prefix_cache, "BLOCK", 2)
    begin, reserve = Scheduler._begin, PrefixCache.reserve

    def counted_begin(self: Scheduler, request: Request, leader: Request | None) -> Copies | None:
        copies = begin(self, request, leader)
        events["prefixes"] += copies is not None and leader is None and request.done > 0
        return copies

    def counted_reserve(
        self: PrefixCache, request: Request, length: int, beginning: Beginning | None = None
    ) -> bool:
        before = len(self._texts)
        has_slots = reserve(self, request, length, beginning)
        events["drops"] += before - len(self._texts)
        assert has_slots or len(self._texts) == before
        source = None if beginning is None else beginning.source
        is_kept = isinstance(source, KeptText) and has_slots
        events["prefixes beside drops"] += is_kept and len(self._texts) < before
        assert source in self._texts or not isinstance(source, KeptText)
        return has_slots

    monkeypatch.setattr(Scheduler, "_begin", counted_begin)
    monkeypatch.setattr(PrefixCache, "reserve", counted_reserve)

    def counted(self: Scheduler, request: Request) -> None:
        events["pauses"] += 1
        pause(self, request)

    monkeypatch.setattr(Scheduler, "_pause", counted)
    for seed in range(150):
        run = Run(seed, storage, events)
        run.finish_all()
        for request in run.requests:
            if request.num_scored and request.reason != "abort":
                assert len(request.logprobs) == request.num_scored
        run.scheduler.prefixes.forget()
        # All slots are free: a text of any length fits again.
        assert run.allocator.reserve("next", run.allocator.capacity, run.allocator.capacity)
    assert events["copies"] > 20 and events["state copies"] > 20 and events["slides"] > 100
    assert events["long"] > 100 and events["prefixes"] > 25 and events["drops"] > 50
    assert events["prefixes beside drops"] > 0
    assert (events["pauses"] > 20) == (storage == "pages")
