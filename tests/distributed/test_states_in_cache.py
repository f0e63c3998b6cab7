"""States of hybrid models while text is written: rows of requests that share a prompt, give way, or
need more memory than there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_lightning.errors import ConfigError
from megatron_lightning.inference import Engine, EngineOptions
from megatron_lightning.inference.engine.keys.key_slots import StateRows
from megatron_lightning.inference.engine.request_batch import Batch
from megatron_lightning.inference.engine.scheduler import Scheduler
from megatron_lightning.layers.state.state_store import StateStore
from tests.distributed.test_generate import save_plain
from tests.distributed.test_inference_engine import (
    CONFIGS,
    DRAWN,
    GREEDY,
    LAYOUTS,
    PROMPTS,
    engines_of,
    model_of,
    saved,
    texts_of,
    uncached,
)
from tests.helpers.ranks import run_ranks


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_plain(tmp_path_factory.mktemp("states") / "states", CONFIGS["states"])


def _engine(path: str, **options: Any) -> Engine:
    return Engine.load(path, options=EngineOptions(**options))


def test_the_lowest_free_row_is_taken_first() -> None:
    rows = StateRows()
    for request in "abc":
        rows.take(request)
    rows.take("b")
    assert [rows[request] for request in "abc"] == [0, 1, 2]
    rows.release("a")
    rows.release("b")
    rows.take("d")
    rows.take("e")
    rows.take("f")
    assert [rows[request] for request in "cdef"] == [2, 0, 1, 3]


SMALL: dict[str, dict[str, Any]] = {
    "runs": {"storage": "runs"},
    "pages": {"storage": "pages", "block_size": 4},
    "chunks": {"max_tokens": 7, "max_requests": 6},
    "few": {"max_requests": 2},
}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens of all portions so far."""
    numbers, plan = list[int](), Scheduler.plan

    def counting(self: Scheduler, group: int) -> Batch:
        batch = plan(self, group)
        numbers.extend(portion.count for portion in batch.portions)
        return batch

    monkeypatch.setattr(Scheduler, "plan", counting)
    return numbers


@pytest.mark.spread(1)
@pytest.mark.parametrize("case", SMALL)
def test_samples_of_a_prompt_copy_its_states(case: str, path: str, computed: list[int]) -> None:
    engine, prompts = _engine(path, **SMALL[case]), PROMPTS[:5]
    found = engine.generate(prompts, DRAWN, num_samples=3)
    num_together = sum(computed)
    computed.clear()
    apart = texts_of(engine, DRAWN, [prompt for prompt in prompts for _ in range(3)])
    assert [one.tokens for samples in found for one in samples] == apart
    assert len({tuple(one.tokens) for one in found[0]}) == 3
    num_shared = sum(computed) - num_together
    most_shared = sum(2 * (len(prompt) - 1) for prompt in prompts)
    # A few rows leave no room beside the leaders.
    assert num_shared == most_shared if case in ("runs", "pages") else num_shared >= 0


def test_texts_without_copied_states_are_others(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(path)
    expected = engine.generate(PROMPTS[:3], DRAWN, num_samples=2)
    monkeypatch.setattr(StateStore, "copy", lambda *_: None)
    assert engine.generate(PROMPTS[:3], DRAWN, num_samples=2) != expected


@pytest.mark.parametrize("case", SMALL)
def test_scores_after_one_context_copy_its_states(
    case: str, path: str, computed: list[int]
) -> None:
    """fp32, sums in another order: 1e-5 of log-probabilities of up to 10."""
    engine = _engine(path, **SMALL[case])
    context = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35]
    pairs = [(context, [i, 2 * i, 7][: 1 + i % 3]) for i in range(5)]
    pairs += [([8], [9, 7]), (context[:9], [35, 4]), ([8], [3]), (context * 7, [1])]
    apart = [engine.score([one], [other])[0] for one, other in pairs]
    num_apart = sum(computed)
    computed.clear()
    together = engine.score(*map(list, zip(*pairs, strict=True)))
    for own, other in zip(apart, together, strict=True):
        assert own.logprobs == pytest.approx(other.logprobs, rel=1e-5, abs=1e-5)
    num_shared, most_shared = num_apart - sum(computed), 4 * (len(context) - 1)
    assert num_shared == most_shared if case in ("runs", "pages") else num_shared >= 0


def _samples(paths: dict[str, str], layouts: dict[str, dict[str, Any]]) -> Any:
    found = {}
    for key, engine in engines_of(paths, layouts, SMALL):
        together = engine.generate(PROMPTS, DRAWN, num_samples=3)
        apart = texts_of(engine, DRAWN, [prompt for prompt in PROMPTS for _ in range(3)])
        found[key] = [one.tokens for samples in together for one in samples], apart
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2 sp", "pp2", "pp2 vpp2"])
def test_samples_on_two_ranks(layout: str, tmp_path: Path) -> None:
    paths = saved(tmp_path, ("states", "delta net"))
    prompts = [prompt for prompt in PROMPTS for _ in range(3)]
    expected = {name: uncached(model_of(CONFIGS[name]), DRAWN, prompts) for name in paths}
    for found in run_ranks(2, _samples, paths, {layout: LAYOUTS[layout]}, timeout_s=110):
        for (name, _, _), (together, apart) in found.items():
            assert together == apart == expected[name]


def test_requests_that_give_way_begin_with_empty_states(path: str) -> None:
    """Pages for little more than the longest text: the youngest begin again."""
    bytes_per_slot = 2 * 2 * 8 * 4  # keys and values, groups, head size, fp32
    heads, channels = 8, 128 + 2 * 2 * 16
    bytes_per_row = 2 * 4 * (3 * channels + heads * 16 * 16)  # two layers
    options = {"storage": "pages", "block_size": 4, "max_tokens": 16, "max_requests": 6}
    engine = _engine(path, cache_gib=(6 * bytes_per_row + 72 * bytes_per_slot) / 2**30, **options)
    assert texts_of(engine, GREEDY) == uncached(model_of(CONFIGS["states"]), GREEDY)
    with pytest.raises(ConfigError, match=r"states of max_requests=6 requests need.*Raise"):
        texts_of(_engine(path, cache_gib=5 * bytes_per_row / 2**30, **options), GREEDY)
