"""A request that fails, fails alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megatron_lightning.errors import ConfigError, NonFiniteError
from megatron_lightning.inference import Engine, EngineOptions, Sampling
from megatron_lightning.inference.engine.request_batch import NOT_FINITE, Request
from megatron_lightning.inference.serving.new_weights import Version
from megatron_lightning.inference.serving.serving_thread import Stepping, start
from megatron_lightning.models import GPTModel
from tests.helpers.layouts import tiny_config

SPOILED = 9
"""Token with an embedding that is no number."""
GREEDY = Sampling(max_new_tokens=6, temperature=0.0)


@pytest.fixture(params=["runs", "pages"])
def engine(request: Any) -> Engine:
    torch.manual_seed(0)
    model = GPTModel(tiny_config(num_layers=2)).eval()
    with torch.no_grad():
        # A token of no other text: the output layer has weights of its own.
        model.embedding.word_embeddings.weight[SPOILED] = torch.nan
    options = EngineOptions(storage=request.param, block_size=4)
    return Engine.of(model, options=options)


def test_a_request_that_fails_fails_alone(engine: Engine) -> None:
    expected = engine.generate([[1, 2, 3]], GREEDY)
    assert SPOILED not in expected[0][0].tokens
    with pytest.raises(NonFiniteError, match="logits are not finite"):
        engine.generate([[1, 2, 3], [1, SPOILED]], GREEDY)
    with pytest.raises(NonFiniteError, match="logits are not finite"):
        engine.score([[SPOILED]], [[2]])
    told: dict[str, list[Any]] = {"good": [], "spoiled": [], "drawn": [], "empty": [], "after": []}
    stepping = Stepping(engine, 8)
    thread = start(stepping, lambda: None)
    stepping.wait_until_ready()

    def add(name: str, tokens: list[int], sampling: Sampling = GREEDY) -> None:
        stepping.add(tokens, sampling, 0, lambda request: told[name].append(_copied(request)))

    add("good", [1, 2, 3])
    add("spoiled", [1, SPOILED])
    add("drawn", [SPOILED, 1], Sampling(max_new_tokens=6, temperature=0.7, top_k=3, top_p=0.9))
    add("empty", [])
    for name in ("good", "spoiled", "drawn", "empty"):
        _wait(told[name])
    add("after", [1, 2, 3])  # in the slots of the failed requests
    _wait(told["after"])
    stepping.end()
    thread.join()
    for name in ("good", "after"):
        assert told[name][-1] == (expected[0][0].tokens, "length")
    assert told["spoiled"][-1][1] == told["drawn"][-1][1] == NOT_FINITE
    assert isinstance(told["empty"][-1], ConfigError)
    assert stepping.failure is None


def _copied(request: Request | ConfigError | None) -> Any:
    return (request.new_tokens, request.reason) if isinstance(request, Request) else request


def _wait(told: list[Any]) -> None:
    while not told or (isinstance(told[-1], tuple) and told[-1][1] is None):
        torch.rand(1000).sum()


class _Scaled:
    """Weights that are all a little larger."""

    def __init__(self, model: GPTModel) -> None:
        self.version: Version | None = None
        self._model = model

    @property
    def step(self) -> int | None:
        return None if self.version is None else self.version.step

    def prepare(self, version: Version) -> Any:
        if version.step < 5:
            raise ConfigError("there are none")

        def read() -> None:
            with torch.no_grad():
                for parameter in self._model.parameters():
                    parameter.mul_(1.3)
            self.version = version

        return read


@pytest.mark.parametrize("storage", ["runs", "pages"])
def test_new_weights_between_steps_leave_no_old_keys(storage: Any) -> None:
    """Tokens behind the change have the log-probabilities of the new weights alone."""
    torch.manual_seed(0)
    model = GPTModel(tiny_config(max_sequence_length=64)).eval()
    engine = Engine.of(model, options=EngineOptions(storage=storage, block_size=4, max_requests=2))
    stepping = Stepping(engine, 8)
    told: list[list[Any]] = [[], [], []]
    taken: list[Any] = []
    stepping.weights = _Scaled(model)  # type: ignore[assignment]

    def tell(number: int, request: Any) -> None:
        if number == 0 and len(request.new_tokens) == 7 and not taken:
            taken.append(stepping.take_weights(Version("a", 5)))
        told[number].append((request.new_tokens, [*request.logprobs], [*request.steps]))

    sampling = Sampling(max_new_tokens=20, temperature=1.0)
    thread = start(stepping, lambda: None)
    stepping.wait_until_ready()
    for number in range(3):
        stepping.add([1, 2, number], sampling, 0, partial(tell, number), stops=frozenset())
    while any(not one or len(one[-1][0]) < 20 for one in told):
        torch.rand(1000).sum()
    assert taken[0].result() == Version("a", 5)
    with pytest.raises(ConfigError, match="there are none"):
        stepping.take_weights(Version("b", 1)).result()
    assert stepping.take_weights(Version("a", 3)).result() == Version("a", 5)  # older ones
    stepping.end()
    thread.join()
    for number, states in enumerate(told):
        tokens, logprobs, steps = states[-1]
        old = steps.count(None)
        assert steps == [None] * old + [5] * (20 - old) and (old > 0) == (number < 2)
        [score] = engine.score([[1, 2, number, *tokens[:old]]], [tokens[old:]])
        assert logprobs[old:] == pytest.approx(score.logprobs, abs=1e-5)


def test_temperatures_beyond_numbers_are_refused() -> None:
    for temperature in (1e-310, 1e-7, 5e-324):
        with pytest.raises(ConfigError, match=r"Set it to 0, or to 1e-06 or more"):
            Sampling(temperature=temperature)
    logits = torch.tensor([0.0, 30.0, 29.0, -torch.inf])
    for temperature in (1e-6, 1e-5, 1e308):
        token = Sampling(temperature=temperature).choose(logits, torch.Generator().manual_seed(0))
        assert token == 1 if temperature < 1 else token < 3
