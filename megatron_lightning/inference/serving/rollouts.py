"""Requests of a fit to ``serve --accept-weights``: texts by ids, and new weights.

``POST /v1/rollouts`` continues prompts, and tells for each token the step of the weights that chose
it. ``POST /v1/weights`` names a folder with new weights, which are taken between two steps of the
engine. Both need the API key, and neither exists without ``--accept-weights``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.engine.request_batch import NOT_FINITE, Request
from megatron_lightning.inference.engine.uncached_loop import Sampling
from megatron_lightning.inference.serving.api_models import ApiError
from megatron_lightning.inference.serving.new_weights import Version
from megatron_lightning.inference.serving.serving_thread import Stepping

STALE = 409
"""Status of a request for weights that this server does not have yet."""
_GONE = 499


class RolloutApi:
    """Answers a fit.

    Args:
        stepping: The engine's thread.
        body: Returns the JSON of a request.
        disconnected: Returns when the client of a request has left.
    """

    def __init__(
        self,
        stepping: Stepping,
        body: Callable[[Any], Awaitable[Any]],
        disconnected: Callable[[Any], Awaitable[None]],
    ) -> None:
        self._stepping = stepping
        self._body = body
        self._disconnected = disconnected

    async def weights(self, http: Any) -> dict[str, Any]:
        """Take new weights. Return the weights that the server has then."""
        version = _version_of(_mapping(await self._body(http)))
        if version is None:
            raise ApiError(400, "run and step name the weights, and one is missing.")
        try:
            taken = self._stepping.take_weights(version)
        except ConfigError as error:
            raise ApiError(503, str(error)) from error
        try:
            # A request that is cancelled leaves the future to the engine, which sets it.
            now = await asyncio.shield(asyncio.wrap_future(taken))
        except ConfigError as error:
            raise ApiError(400, str(error)) from error
        except RuntimeError as error:
            raise ApiError(503, str(error)) from error
        return {"run": now.run, "step": now.step}

    async def texts(self, http: Any) -> dict[str, Any] | None:
        """Return continuations of prompts. None: the client has left."""
        body = _mapping(await self._body(http))
        wanted = _version_of(body)
        self._check_version(wanted)
        run = None if wanted is None else wanted.run
        requests = [_request_of(one) for one in _list(body, "requests")]
        for tokens, sampling in requests:
            self._check_tokens(tokens, sampling)
        stops = frozenset(_ids(body.get("stops"), "stops"))
        loop = asyncio.get_running_loop()
        begun = [_Text(self._stepping, loop, run) for _ in requests]
        work: asyncio.Future[Any] = asyncio.gather(*(one.ended for one in begun))
        gone: asyncio.Future[Any] = asyncio.ensure_future(self._disconnected(http))
        try:
            for text, (tokens, sampling) in zip(begun, requests, strict=True):
                text.begin(tokens, sampling, stops)
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            return {"texts": work.result()} if work.done() else None
        finally:
            gone.cancel()
            work.cancel()
            for one in begun:
                one.give_up()

    def _check_version(self, wanted: Version | None) -> None:
        weights = self._stepping.weights
        has = None if weights is None else weights.version
        if wanted is not None and (has is None or not has.reaches(wanted)):
            step = "those it has started with" if has is None else f"{has.run}, step {has.step}"
            raise ApiError(STALE, f"the weights are {step}, and {wanted} are asked for.")

    def _check_tokens(self, tokens: list[int], sampling: Sampling) -> None:
        """Refuse what would end the engine, or slide the model's window behind the first tokens."""
        weights, longest = self._stepping.weights, self._stepping.longest
        if weights is not None and not all(0 <= one < weights.vocab_size for one in tokens):
            raise ApiError(400, f"a prompt has an id beyond the model's {weights.vocab_size}.")
        if len(tokens) + sampling.max_new_tokens - 1 > longest:
            raise ApiError(
                400,
                f"a prompt of {len(tokens)} ids with {sampling.max_new_tokens} new ones is longer "
                f"than the {longest} of model and cache. Raise --cache-gib, or lower "
                "max_completion_length.",
            )


class _Text:
    """A text on the way. ``run`` names the fit whose weights alone may write it. None: any."""

    def __init__(
        self, stepping: Stepping, loop: asyncio.AbstractEventLoop, run: str | None
    ) -> None:
        self._stepping = stepping
        self._loop = loop
        self._run = run
        self._number: int | None = None
        self.ended: asyncio.Future[dict[str, Any]] = loop.create_future()
        """Result of the text."""

    def begin(self, tokens: list[int], sampling: Sampling, stops: frozenset[int]) -> None:
        """Give the text to the engine.

        Raises:
            ApiError: If the engine ends.
        """
        try:
            self._number = self._stepping.add(tokens, sampling, 0, self._tell, stops=stops)
        except ConfigError as error:
            raise ApiError(503, str(error)) from error

    def _tell(self, request: Request | ConfigError | None) -> None:
        """Take note of the end. Called from the stepping thread after every step."""
        now = None if self._stepping.weights is None else self._stepping.weights.version
        if isinstance(request, Request) and now is not None and self._run not in (None, now.run):
            request = ConfigError(
                f"the server has weights of another fit by now ({now.run}, the text is of "
                f"{self._run}), and the text would be of both. A server serves one fit at a time: "
                "end the other one, or give each fit servers of its own."
            )
        if isinstance(request, Request) and request.reason is None:
            return
        self._loop.call_soon_threadsafe(self._end, request)

    def _end(self, request: Request | ConfigError | None) -> None:
        if self.ended.done():
            return
        if isinstance(request, ConfigError):
            self.ended.set_exception(ApiError(400, str(request)))
        elif request is None:
            self.ended.set_exception(ApiError(503, "the engine has ended, and with it the text."))
        elif request.reason == NOT_FINITE:
            # No status of a server that is away: every other one would compute the same.
            message = "the model's logits for a text are not finite, so it cannot go on."
            self.ended.set_exception(ApiError(422, message))
        else:
            self.ended.set_result(_state_of(request))

    def give_up(self) -> None:
        """End the text, unless already ended."""
        if self._number is not None:
            self._stepping.give_up(self._number)


def _state_of(request: Request) -> dict[str, Any]:
    end = request.end
    return {
        "ids": [*request.new_tokens, *(() if end is None else (end[0],))],
        "logprobs": [*request.logprobs, *(() if end is None else (end[1],))],
        "steps": list(request.steps),
        "ended": end is not None,
        "reason": request.reason,
    }


def _mapping(body: Any) -> Mapping[str, Any]:
    if not isinstance(body, Mapping):
        raise ApiError(400, "the body is no object.")
    return body


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(body.get(name), list):
        raise ApiError(400, f"{name} is no list.", name)
    found: list[Any] = body[name]
    return found


def _version_of(body: Mapping[str, Any]) -> Version | None:
    run, step = body.get("run"), body.get("step")
    if run is None and step is None:
        return None
    is_name = isinstance(run, str) and run.isalnum() and len(run) <= 64
    if not is_name or not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ApiError(400, "run is a name of letters and digits, and step a number from 0 on.")
    return Version(str(run), step)


def _request_of(one: Any) -> tuple[list[int], Sampling]:
    try:
        sampling = Sampling(
            max_new_tokens=int(one["max_new_tokens"]),
            temperature=float(one["temperature"]),
            seed=int(one["seed"]),
        )
        return _ids(one["prompt"], "prompt"), sampling
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ApiError(
            400, f"a request has prompt, max_new_tokens, temperature, seed: {error!r}"
        ) from error


def _ids(values: Any, name: str) -> list[int]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ApiError(400, f"{name} is no list of ids.", name)
    return list(values)
