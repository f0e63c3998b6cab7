"""States of hybrid models while text is written: rows of requests that share a prompt, give way, or
need more memory than there is."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lightning.errors import ConfigError
from megatron_lightning.inference import Engine, EngineOptions
from megatron_lightning.inference.cache import StateRows
from tests.distributed.test_generate import save_plain
from tests.distributed.test_inference_engine import (
    CONFIGS,
    DRAWN,
    GREEDY,
    PROMPTS,
    model_of,
    texts_of,
    uncached,
)


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


@pytest.mark.parametrize("storage", ["runs", "pages"])
def test_samples_of_a_prompt_have_states_of_their_own(storage: Any, path: str) -> None:
    engine = _engine(path, storage=storage, block_size=4)
    found = engine.generate(PROMPTS[:3], DRAWN, num_samples=2)
    apart = texts_of(engine, DRAWN, [prompt for prompt in PROMPTS[:3] for _ in range(2)])
    assert [one.tokens for samples in found for one in samples] == apart
    assert len({tuple(one.tokens) for one in found[0]}) == 2


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
