"""Requests of a fit to a server: a text that cannot go on, and weights that nobody waits for."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lightning.errors import ConfigError
from megatron_lightning.inference import Sampling
from megatron_lightning.inference.engine.request_batch import NOT_FINITE, Request
from megatron_lightning.inference.serving.api_models import ApiError
from megatron_lightning.inference.serving.new_weights import Version
from megatron_lightning.inference.serving.rollouts import RolloutApi

ONE = {"prompt": [1, 2], "max_new_tokens": 3, "temperature": 1.0, "seed": 5}
BODY = {"run": "a", "step": 0, "requests": [ONE, ONE], "stops": []}


class _Stepping:
    """A stepping thread whose texts a test moves."""

    def __init__(self, room: int = 2) -> None:
        self.weights: Any = SimpleNamespace(version=Version("a", 0), vocab_size=9)
        self.longest = 64
        self.sinks: list[Any] = []
        self.given_up: list[int] = []
        self.taking: Future[Version] = Future()
        self._room = room

    def add(self, tokens: Any, sampling: Any, num_scored: int, sink: Any, *, stops: Any) -> int:
        if len(self.sinks) == self._room:
            raise ConfigError("the server ends")
        self.sinks.append(sink)
        return len(self.sinks) - 1

    def give_up(self, number: int) -> None:
        self.given_up.append(number)

    def take_weights(self, version: Version) -> Future[Version]:
        return self.taking


def _api(stepping: Any) -> RolloutApi:
    async def itself(body: Any) -> Any:
        return body

    async def stays(_: Any) -> None:
        await asyncio.Event().wait()

    return RolloutApi(stepping, itself, stays)


def _asked(stepping: _Stepping, reason: str | None, run: str = "a") -> ApiError:
    """Ask for two texts, the second of which takes a step by weights of a run. Return the error."""

    async def ask() -> Any:
        texts = asyncio.ensure_future(_api(stepping).texts(BODY))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stepping.weights.version = Version(run, 0)
        if len(stepping.sinks) == 2:
            request = Request([1, 2], Sampling(), torch.Generator(), longest=9, reason=reason)
            stepping.sinks[1](request)
        return await texts

    with pytest.raises(ApiError) as caught:
        asyncio.run(asyncio.wait_for(ask(), 5.0))
    return caught.value


def test_a_text_of_two_fits_is_refused_at_once() -> None:
    stepping = _Stepping()
    error = _asked(stepping, None, run="b")
    assert error.status == 400 and "weights of another fit by now (b" in str(error)
    assert stepping.given_up == [0, 1]


def test_a_text_that_no_server_can_write_is_no_sign_of_an_ended_server() -> None:
    error = _asked(_Stepping(), NOT_FINITE)
    assert error.status == 422 and "not finite" in str(error)


def test_texts_before_one_that_cannot_begin_are_given_up() -> None:
    stepping = _Stepping(room=1)
    assert _asked(stepping, None).status == 503
    assert stepping.given_up == [0]


def test_weights_that_nobody_waits_for_leave_the_engine_its_future() -> None:
    stepping = _Stepping()

    async def ask() -> None:
        await asyncio.wait_for(_api(stepping).weights({"run": "a", "step": 1}), 0.01)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(ask())
    stepping.taking.set_result(Version("a", 1))


@pytest.mark.parametrize("wrong", [{"seed": 2**70}, {"max_new_tokens": 1e999}])
def test_numbers_that_would_end_the_engine_are_refused(wrong: dict[str, Any]) -> None:
    stepping = _Stepping()
    body = {**BODY, "requests": [{**ONE, **wrong}]}
    with pytest.raises((ApiError, ConfigError), match=r"64 bits|OverflowError"):
        asyncio.run(_api(stepping).texts(body))
    assert not stepping.sinks
