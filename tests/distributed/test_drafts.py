"""Drafts by layers of multi-token prediction: the text without drafts, on every layout.

The models nearly follow a permutation of the vocabulary, and so do the layers of multi-token
prediction: about half of the drafts are accepted, and texts have many distinct tokens.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference import Engine, EngineOptions
from megatron_lightning.inference.engine.request_batch import Portion
from megatron_lightning.inference.engine.scheduler import Scheduler
from megatron_lightning.inference.engine.speculative import make_drafter
from megatron_lightning.layers.attention.sequence_info import SequenceInfo
from megatron_lightning.models.transformer import GPTModel
from tests.distributed.test_inference_engine import (
    CONFIGS,
    DRAWN,
    EP,
    ETP,
    GREEDY,
    PP,
    PROMPTS,
    TP,
    VPP,
    engines_of,
    texts_of,
    uncached,
    without_capacity,
)
from tests.helpers.ranks import run_ranks

NAMES = ("grouped", "window", "scaled", "experts", "learned", "latent", "sliding")
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sp": {TP: 2},
    "pp2": {PP: 2},
    "pp2 vpp2": {PP: 2, VPP: 2},
    "tp2 ep2": {TP: 2, EP: 2, ETP: 1},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "one": {"draft_tokens": 1},
    "two": {"draft_tokens": 2},
    "chunks": {"draft_tokens": 2, "max_tokens": 7, "max_requests": 3},
    "pages": {"draft_tokens": 1, "storage": "pages", "block_size": 4, "max_tokens": 12,
              "max_requests": 6},
}  # fmt: skip


def config_of(name: str, depths: int = 2) -> TransformerConfig:
    own = {"mtp_num_layers": depths, "share_embeddings_and_output_weights": False}
    return without_capacity(TransformerConfig(**{**asdict(CONFIGS[name]), **own}))


def model_of(config: TransformerConfig) -> GPTModel:
    """A model whose next token is mostly a permutation of the last."""
    model = GPTModel(config).eval()
    h, v = config.hidden_size, config.vocab_size
    strength = 6.5 if config.position_embedding_type == "rope" else 3.0
    draws = torch.Generator().manual_seed(3)
    cycle = torch.randperm(v, generator=draws)
    following = torch.empty_like(cycle)
    following[cycle] = cycle.roll(-1)
    with torch.no_grad():
        words = model.embedding.word_embeddings.weight
        words.copy_(torch.randn(v, h, generator=draws) * strength)
        model.output_layer.weight[following] = words / strength
        assert model.mtp is not None
        for layer in model.mtp.layers.values():
            layer.eh_proj.weight.mul_(0.1)
            layer.eh_proj.weight[:, :h] += strength * torch.eye(h)
    return model


def save(path: Path, config: TransformerConfig) -> str:
    state = {f"model.{name}": tensor for name, tensor in model_of(config).state_dict().items()}
    torch.save({"state_dict": state, "hyper_parameters": {"config": asdict(config)}}, path)
    return str(path)


def expected_texts(names: Any, samplings: Any) -> dict[str, list[list[list[int]]]]:
    return {name: [uncached(model_of(config_of(name)), s) for s in samplings] for name in names}


def found_texts(
    paths: dict[str, str],
    layouts: dict[str, dict[str, Any]],
    options: dict[str, dict[str, Any]],
    samplings: Any = (GREEDY, DRAWN),
) -> dict[tuple[str, str, str], tuple[Any, float]]:
    found = {}
    for key, engine in engines_of(paths, layouts, options):
        texts = [texts_of(engine, sampling) for sampling in samplings]
        found[key] = texts, engine.draft_counts.acceptance
    return found


def check(found: Any, samplings: Any = (GREEDY, DRAWN)) -> None:
    names = {name for name, _, _ in found}
    expected = expected_texts(names, samplings)
    wrong = {key for key, (texts, _) in found.items() if texts != expected[key[0]]}
    assert wrong == set()
    rates = {key: rate for key, (_, rate) in found.items()}
    assert all(0.1 < rate < 0.95 for rate in rates.values()), rates
    assert all(
        len({t for row in texts for own in row for t in own}) > 40 for texts in expected.values()
    )


def paths_of(folder: Path, names: Any) -> dict[str, str]:
    return {name: save(folder / name, config_of(name)) for name in names}


@pytest.mark.slow
def test_one_process_gives_the_text_without_drafts(tmp_path: Path) -> None:
    options = {name: OPTIONS[name] for name in ("chunks", "pages")}
    check(found_texts(paths_of(tmp_path, ("window", "latent")), {"1": {}}, options))


def test_two_stages_give_the_same_text(tmp_path: Path) -> None:
    _compare_two_ranks(["pp2 vpp2"], tmp_path)


@pytest.mark.slow
def test_two_ranks_give_the_same_text(tmp_path: Path) -> None:
    _compare_two_ranks(["tp2 ep2", "pp2 vpp2"], tmp_path)


def _compare_two_ranks(layouts: list[str], folder: Path) -> None:
    options, paths = {"chunks": OPTIONS["chunks"]}, paths_of(folder, ("experts",))
    named = {name: LAYOUTS[name] for name in layouts}
    first, second = run_ranks(2, found_texts, paths, named, options, [DRAWN], timeout_s=110)
    assert first == second
    check(first, [DRAWN])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_all_models(name: str, tmp_path: Path) -> None:
    paths = paths_of(tmp_path, (name,))
    check(found_texts(paths, {"1": {}}, OPTIONS))
    for found in run_ranks(2, found_texts, paths, LAYOUTS, OPTIONS, timeout_s=110):
        check(found)


@pytest.mark.slow
def test_four_ranks_give_the_same_text(tmp_path: Path) -> None:
    layouts = {"tp2 pp2": {TP: 2, PP: 2}, "pp2 vpp2 tp2": {PP: 2, VPP: 2, TP: 2}}
    paths = paths_of(tmp_path, ("grouped", "experts"))
    for found in run_ranks(4, found_texts, paths, layouts, OPTIONS, timeout_s=110):
        check(found)


@pytest.mark.parametrize("storage", ["runs", "pages"])
def test_scores_over_several_steps_are_those_without_drafts(storage: Any) -> None:
    """fp32, sums in another order: 1e-5 of log-probabilities of up to 30."""
    model = model_of(config_of("grouped"))
    pairs = ([[3, 1, 4], [3, 1, 4], [7, 7]], [list(range(2, 32)), [5] * 12, [9, 8, 7]])
    plain = Engine.of(model).score(*pairs)
    options = EngineOptions(draft_tokens=2, max_tokens=7, max_requests=3, storage=storage)
    engine = Engine.of(model, options=options)
    for own, other in zip(engine.score(*pairs), plain, strict=True):
        assert own.logprobs == pytest.approx(other.logprobs, rel=1e-5, abs=1e-5)
    assert engine.draft_counts.proposed == 0


PAIRS = ([[3, 1, 4], [3, 1, 4], [7, 7], [5]], [list(range(2, 32)), [5] * 12, [9, 8, 7], [1]])


def found_scores(paths: dict[str, str]) -> dict[Any, Any]:
    options = {name: OPTIONS[name] for name in ("chunks", "pages")}
    return {
        key: ([own.logprobs for own in engine.score(*PAIRS)], engine.draft_counts.proposed)
        for key, engine in engines_of(paths, LAYOUTS, options)
    }


@pytest.mark.slow
def test_scores_on_two_ranks_are_those_without_drafts(tmp_path: Path) -> None:
    """fp32, sums in another order: 1e-5 of log-probabilities of up to 30."""
    paths = paths_of(tmp_path, ("grouped", "experts"))
    expected = {name: Engine.of(model_of(config_of(name))).score(*PAIRS) for name in paths}
    for found in run_ranks(2, found_scores, paths, timeout_s=110):
        for (name, _, _), (logprobs, proposed) in found.items():
            assert proposed == 0
            for own, other in zip(logprobs, expected[name], strict=True):
                assert own == pytest.approx(other.logprobs, rel=1e-5, abs=1e-5)


def reference_drafts(model: GPTModel, text: list[int], depths: int) -> list[int]:
    """Return the drafts behind a text by the layers' training forward, without a cache."""
    text, drafts = list(text), list[int]()
    tokens = torch.tensor([text[:-1]])
    positions = torch.arange(len(text) - 1)[None]
    hidden = model.decoder(model.embedding(tokens, positions), SequenceInfo(positions))
    assert model.mtp is not None
    for depth, layer in enumerate(model.mtp.layers.values(), 1):
        if depth > depths:
            break
        ahead = torch.tensor([text[depth:]])
        hidden = layer.train()(hidden, ahead, None, SequenceInfo(positions))
        layer.eval()
        logits = model._full(model.output_layer(model._scaled(hidden[-1:])))
        drafts.append(int(logits.argmax()))
        text.append(drafts[-1])
    return drafts


@pytest.mark.spread(1)
@pytest.mark.parametrize(("name", "case"), [("window", "two"), ("latent", "chunks")])
def test_drafts_are_those_of_the_training_forward(
    name: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After refused drafts too, whose keys have to be gone in all depths."""
    config = config_of(name)
    model, found = model_of(config), list[tuple[list[int], list[int]]]()
    finish = Scheduler.finish

    def recording(self: Scheduler, batch: Any, results: Any, drafts: Any = ()) -> None:
        finish(self, batch, results, drafts)
        found.extend((list(p.request.tokens), list(p.request.drafts)) for p in batch.portions)

    monkeypatch.setattr(Scheduler, "finish", recording)
    engine = Engine.of(model, options=EngineOptions(**OPTIONS[case]))
    engine.generate(PROMPTS, DRAWN)
    checked = [(text, drafts) for text, drafts in found if drafts]
    assert len(checked) > 50
    assert engine.draft_counts.acceptance < 0.9
    with torch.no_grad():
        wrong = [text for text, own in checked if reference_drafts(model, text, 2) != own]
    assert wrong == []


@pytest.mark.parametrize("draft_tokens", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_samples_and_ends_are_those_without_drafts(draft_tokens: int) -> None:
    """Samples share the keys of a prompt. End tokens and lengths end a text between drafts."""
    config = config_of("grouped")
    model = model_of(config)
    [full] = uncached(model, GREEDY, [[7]])
    ends = next(own for own in full[9:] if full.count(own) == 1)
    for stops in ((), (ends,)):
        for length in (1, 2, 3, 24):
            sampling = replace(DRAWN, max_new_tokens=length, temperature=0.5)
            plain = Engine.of(model, stops=stops).generate(PROMPTS, sampling, 3)
            options = EngineOptions(draft_tokens=draft_tokens)
            engine = Engine.of(model, options=options, stops=stops)
            found = engine.generate(PROMPTS, sampling, 3)
            assert [[own.tokens for own in row] for row in found] == [
                [own.tokens for own in row] for row in plain
            ]
            for rows in zip(found, plain, strict=True):
                for own, other in zip(*rows, strict=True):
                    logprobs = (torch.tensor(one.logprobs) for one in (own, other))
                    assert own.reason == other.reason
                    assert torch.allclose(*logprobs, atol=1e-4)  # fp32, logits to 66


def test_steps_are_saved_and_counted() -> None:
    model = model_of(config_of("grouped"))
    plain, drafting = Engine.of(model), Engine.of(model, options=EngineOptions(draft_tokens=2))
    assert texts_of(plain, GREEDY) == texts_of(drafting, GREEDY)
    assert drafting.num_steps < 0.8 * plain.num_steps
    counts = drafting.draft_counts
    new = 24 * len(PROMPTS)
    assert 0.1 < counts.acceptance < 0.9
    assert counts.accepted < new
    assert str(counts).endswith(f"% of {counts.proposed} drafts accepted")


def test_a_draft_accepted_without_comparison_gives_another_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(config_of("grouped"))
    expected = texts_of(Engine.of(model), GREEDY)
    monkeypatch.setattr(Portion, "takes", lambda *_: True)
    engine = Engine.of(model, options=EngineOptions(draft_tokens=1))
    assert texts_of(engine, GREEDY) != expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_tokens": 3}, "draft_tokens=3, and the model has 2 layers"),
        ({"draft_tokens": 1, "record_routes": True}, "record_routes=True"),
    ],
)
def test_models_that_cannot_draft_are_refused(options: Any, message: str) -> None:
    model = model_of(config_of("experts"))
    with pytest.raises(ConfigError, match=message):
        Engine.of(model, options=EngineOptions(**options))


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="draft_tokens is -1"):
        EngineOptions(draft_tokens=-1)
    with pytest.raises(ConfigError, match="draft_tokens is 4 and max_tokens is 4"):
        EngineOptions(draft_tokens=4, max_tokens=4, max_requests=1)


def test_layers_on_another_stage_than_the_output_layer_are_refused() -> None:
    model = model_of(config_of("grouped"))
    partition: Any = SimpleNamespace(stages=(("embedding", "mtp.layers.0"), ("output_layer",)))
    with pytest.raises(ConfigError, match="draft_tokens=1 and the last pipeline stage has only"):
        make_drafter(model, EngineOptions(draft_tokens=1), partition, in_lockstep=False)
