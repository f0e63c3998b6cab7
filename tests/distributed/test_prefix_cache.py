"""Keys of ended texts, for later texts that begin alike: the same texts, less computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.inference import Engine, EngineOptions, Sampling
from megatron_lightning.inference.engine.keys.prefix_cache import KeptText, PrefixCache
from megatron_lightning.parallel.grid.layout import ParallelLayout
from tests.distributed import test_drafts as drafts
from tests.distributed.test_inference_engine import (
    CONFIGS,
    DRAWN,
    GREEDY,
    LAYOUTS,
    cache_of,
    model_of,
    saved,
)
from tests.helpers.ranks import run_ranks

SYSTEM = [(7 * i) % 61 for i in range(37)]
BEGINS = [[*SYSTEM, 1, 2, 3], [*SYSTEM, 4, 5], [*SYSTEM[:20], 9], [8, 9]]
OPTIONS: dict[str, dict[str, Any]] = {
    "runs": {},
    "chunks": {"max_tokens": 11, "max_requests": 2},
    "pages": {"storage": "pages", "block_size": 4},
}


def chats(engine: Engine, sampling: Sampling) -> list[list[list[int]]]:
    """Return the texts of two turns: the second begins with prompt and text of the first."""
    texts = [own.tokens for (own,) in engine.generate(BEGINS, sampling)]
    turns = [[*begin, *text, 6] for begin, text in zip(BEGINS, texts, strict=True)]
    return [texts, [own.tokens for (own,) in engine.generate(turns, sampling)]]


def scores(engine: Engine) -> torch.Tensor:
    found = engine.score(BEGINS, [[1, 2], [3], [4, 5, 6], [7]])
    return torch.tensor([score.logprob for score in found])


def both(
    model: Any, sampling: Sampling, **options: Any
) -> tuple[Sequence[Any], Sequence[Any], Engine]:
    """Return texts and scores without and with kept keys, and the engine that keeps them."""
    plain = Engine.of(model, options=EngineOptions(prefix_cache=False, **options))
    engine = Engine.of(model, options=EngineOptions(**options))
    with engine.active():
        found = chats(engine, sampling), chats(engine, sampling), scores(engine)
    texts = chats(plain, sampling)
    return (texts, texts, scores(plain)), found, engine


@pytest.mark.spread(3)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("case", OPTIONS)
def test_texts_and_scores_are_the_same(name: str, case: str) -> None:
    """States of layers (Mamba, delta net) are not kept."""
    sampling = GREEDY if case == "runs" else DRAWN
    expected, found, engine = both(model_of(CONFIGS[name]), sampling, **OPTIONS[case])
    assert found[:2] == expected[:2]
    # fp32: products of other sizes round otherwise, at logits up to 66.
    assert torch.allclose(found[2], expected[2], atol=1e-4)
    share = engine.prefix_counts.share
    if name in ("states", "delta net"):
        assert not share
    elif name != "sliding":  # prompts longer than the model's input
        assert share > 0.5


@pytest.mark.spread(1)
@pytest.mark.parametrize(("storage", "num_slots"), [("runs", 200), ("pages", 120)])
def test_texts_are_the_same_where_slots_are_few(
    storage: str, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are shared beside texts that give their slots, and requests wait or give way."""
    drop, events = PrefixCache._drop, list[str]()

    def counted_drop(self: PrefixCache, text: KeptText) -> None:
        events.append("drop")
        drop(self, text)

    monkeypatch.setattr(PrefixCache, "_drop", counted_drop)
    few = cache_of(num_slots, storage)
    options = {"storage": storage, "block_size": few.block_size, "cache_gib": few.cache_gib}
    expected, found, engine = both(model_of(CONFIGS["grouped"]), DRAWN, **options)
    assert found[:2] == expected[:2]
    assert torch.allclose(found[2], expected[2], atol=1e-4)
    assert engine.prefix_counts.share > 0.2 and len(events) > 10


@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_drafts_depend_on_later_tokens(depth: int) -> None:
    model = drafts.model_of(drafts.config_of("grouped"))
    expected, found, engine = both(model, GREEDY, draft_tokens=depth)
    assert found[:2] == expected[:2]
    assert engine.prefix_counts.share > 0.5
    assert engine.draft_counts.acceptance > 0.1


def _on_ranks(paths: dict[str, str], layouts: list[str]) -> list[Any]:
    found = []
    for name, path in paths.items():
        for layout in layouts:
            for keeps in (False, True):
                engine = Engine.load(
                    path, ParallelLayout(**LAYOUTS[layout]),
                    options=EngineOptions(prefix_cache=keeps, max_tokens=20, max_requests=3),
                )  # fmt: skip
                with engine.active():
                    found.append((name, chats(engine, DRAWN), engine.prefix_counts.reused > 50))
    return found


def test_two_stages_keep_the_same_texts(tmp_path: Path) -> None:
    _compare_ranks(["pp2 vpp2"], tmp_path)


@pytest.mark.slow
def test_ranks_keep_the_same_texts(tmp_path: Path) -> None:
    _compare_ranks(["tp2", "pp2 vpp2"], tmp_path)


def _compare_ranks(layouts: list[str], folder: Path) -> None:
    for found in run_ranks(2, _on_ranks, saved(folder, ("grouped",)), layouts):
        for plain, kept in zip(found[::2], found[1::2], strict=True):
            assert plain[:2] == kept[:2]
            assert (plain[2], kept[2]) == (False, True)


def _texts(engine: Engine) -> list[Any]:
    return [(own.tokens, own.logprobs) for (own,) in engine.generate(BEGINS, GREEDY)]


def _near(texts: list[Any]) -> list[Any]:
    """Return what such texts compare equal to: products of fewer rows round differently on some
    processors.
    """
    return [(tokens, pytest.approx(logprobs, abs=1e-5)) for tokens, logprobs in texts]


def test_a_block_of_calls_keeps_keys_until_weights_change() -> None:
    model = model_of(CONFIGS["grouped"])
    engine = Engine.of(model)
    first = _texts(engine)
    assert first == _texts(engine)
    assert not engine.prefix_counts.reused
    with engine.active() as scheduler:
        assert _texts(engine) == first
        assert not engine.prefix_counts.reused
        assert _texts(engine) == _near(first)
        # All but the last few tokens of three prompts. The fourth has no block.
        assert engine.prefix_counts.reused > sum(len(begin) - 3 for begin in BEGINS[:3])
        for p in model.parameters():
            p.data.mul_(0.7)
        stale = _texts(engine)
        scheduler.restart()
        fresh = _texts(engine)
    assert _near(fresh) == _texts(engine) != stale


def test_an_error_inside_a_block_leaves_no_text_behind() -> None:
    engine = Engine.of(model_of(CONFIGS["grouped"]))

    def stop(_: Any) -> None:
        raise KeyboardInterrupt

    with engine.active() as scheduler:
        with pytest.raises(KeyboardInterrupt):
            engine.generate(BEGINS, GREEDY, observe=stop)
        assert not scheduler.num_requests
        again = engine.generate(BEGINS, GREEDY)
    assert again == engine.generate(BEGINS, GREEDY)


def test_recorded_routes_are_whole() -> None:
    engine = Engine.of(model_of(CONFIGS["experts"]), options=EngineOptions(record_routes=True))
    with engine.active():
        for _ in range(2):
            ((own,), *_) = engine.generate(BEGINS, GREEDY)
            assert own.routes is not None and int(own.routes[:-1].min()) >= 0
