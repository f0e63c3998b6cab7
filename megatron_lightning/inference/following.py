"""Follow requests of the engine from an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.api_answers import Written
from megatron_lightning.inference.api_models import ApiError
from megatron_lightning.inference.batch import NOT_FINITE, Request
from megatron_lightning.inference.sampling import Sampling
from megatron_lightning.inference.stepping import Sink, Stepping


class Followed:
    """Requests of a client, with the last state of each. Memory does not depend on how fast the
    client reads.

    Args:
        stepping: The engine's thread.
        follows: Whether each step's state is wanted. False: the last state alone.
    """

    def __init__(self, stepping: Stepping, *, follows: bool) -> None:
        self._stepping = stepping
        self._follows = follows
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._changed: dict[int, Written | ApiError] = {}
        self._numbers: dict[int, int] = {}
        self.states: list[Written] = []
        """State of each request so far."""

    def add(self, tokens: list[int], sampling: Sampling, num_scored: int = 0) -> None:
        """Run a request.

        Raises:
            ApiError: If the engine has failed or ends.
        """
        index = len(self.states)
        self.states.append(Written())
        try:
            number = self._stepping.add(tokens, sampling, num_scored, self._sink(index))
        except ConfigError as error:
            raise ApiError(503, str(error)) from error
        self._numbers[index] = number

    def add_ended(self) -> None:
        """Take the place of a request without work."""
        self.states.append(Written(reason="length"))

    def _sink(self, index: int) -> Sink:
        """Return a function that passes on a copy of a request's state. Called from the stepping
        thread.
        """

        def tell(request: Request | ConfigError | None) -> None:
            if isinstance(request, Request) and request.reason is None and not self._follows:
                return  # waking the event loop for each request would slow every step
            state = _state_of(request)
            self._loop.call_soon_threadsafe(self._take, index, state)

        return tell

    def _take(self, index: int, state: Written | ApiError) -> None:
        self._changed[index] = state
        self._news.set()

    async def changes(self, deadline: float) -> AsyncIterator[int]:
        """Yield the indices of requests with a new state, up to the ends of all requests.

        Raises:
            ApiError: If the engine or a request has failed, or time is over.
        """
        while any(state.reason is None for state in self.states):
            try:
                await asyncio.wait_for(self._news.wait(), max(0.0, deadline - time.monotonic()))
            except asyncio.TimeoutError as error:
                raise ApiError(504, "the request took longer than this server allows.") from error
            self._news.clear()
            changed, self._changed = self._changed, {}
            for index, state in sorted(changed.items()):
                if isinstance(state, ApiError):
                    raise state
                self.states[index] = state
                yield index

    async def end(self, deadline: float) -> None:
        """Wait for the ends of all requests."""
        async for _ in self.changes(deadline):
            pass

    def give_up(self) -> None:
        """End the requests, unless already ended."""
        for index, number in self._numbers.items():
            if self.states[index].reason is None:
                self._stepping.give_up(number)


def _state_of(request: Request | ConfigError | None) -> Written | ApiError:
    if request is None:
        return ApiError(503, "the engine has ended, and with it this request.")
    if isinstance(request, ConfigError):
        return ApiError(400, str(request))
    if request.reason == NOT_FINITE:
        return ApiError(500, "the model's logits for this text are not finite, so it cannot go on.")
    return Written(request.new_tokens, list(request.logprobs), list(request.best), request.reason)
