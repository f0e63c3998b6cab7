"""Generators of a policy in this process, without HTTP between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import pytest

from megatron_lightning.bridge import AutoBridge
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference import Engine
from megatron_lightning.inference.serving.api_models import ApiError
from megatron_lightning.inference.serving.new_weights import NewWeights, Version
from megatron_lightning.inference.serving.rollouts import STALE, RolloutApi
from megatron_lightning.inference.serving.serving_thread import Stepping, start
from megatron_lightning.models import GPTModel
from megatron_lightning.modules.post_training.generators import ahead
from megatron_lightning.modules.post_training.generators.client import (
    API_KEY,
    AwayError,
    StaleError,
)


async def _itself(body: Any) -> Any:
    return body


async def _stays(_: Any) -> None:
    await asyncio.Event().wait()


class LocalGenerator:
    """A stepping engine behind the methods of ``client.Generator``."""

    def __init__(self, url: str, stepping: Stepping) -> None:
        self.url = url
        self.is_alive = True
        self.asked: list[Mapping[str, Any]] = []
        """Bodies of requests for texts."""
        self._api = RolloutApi(stepping, _itself, _stays)

    def take_weights(self, version: Version, limit_s: float) -> None:
        self._answer(self._api.weights, {"run": version.run, "step": version.step})

    def continue_each(self, body: Mapping[str, Any], limit_s: float) -> Any:
        self.asked.append(body)
        return self._answer(self._api.texts, body)["texts"]

    def _answer(self, method: Any, body: Mapping[str, Any]) -> Any:
        if not self.is_alive:
            raise AwayError(f"{self.url}: killed")
        try:
            return asyncio.run(method(body))
        except ApiError as error:
            if error.status == STALE:
                raise StaleError(str(error)) from error
            raise (AwayError if error.status >= 500 else ConfigError)(str(error)) from error


@contextmanager
def local_generators(
    checkpoint: str, weights: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[LocalGenerator]]:
    """Serve a model by several engines, which fits in the block find by their addresses."""
    monkeypatch.setenv(API_KEY, "secret")
    with ExitStack() as stack:
        found = {}
        for number in range(count):
            # Of this process alone, also in a rank of a fit.
            engine = Engine.of(
                cast(GPTModel, AutoBridge.from_hf_pretrained(checkpoint).to_model("gpt"))
            )
            stepping = Stepping(engine, 64)
            stepping.weights = NewWeights(engine, checkpoint, weights)
            thread = start(stepping, lambda: None)
            stepping.wait_until_ready()
            stack.callback(thread.join)
            stack.callback(stepping.end)
            found[f"http://{number}"] = LocalGenerator(f"http://{number}", stepping)
        monkeypatch.setattr(ahead, "Generator", lambda url, key: found[url])
        yield list(found.values())
