"""Follow requests of the engine from an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from megatron_lightning.data.images.image_prompts import PromptImages
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.engine.request_batch import NOT_FINITE, Request
from megatron_lightning.inference.engine.uncached_loop import Sampling
from megatron_lightning.inference.serving.api_answers import Written
from megatron_lightning.inference.serving.api_models import ApiError
from megatron_lightning.inference.serving.serving_thread import Stepping


class News:
    """Wakes an event loop from the stepping thread, once for any number of changes."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._is_told = False

    def tell(self) -> None:
        """Wake the loop. Called after a change, from the stepping thread."""
        if not self._is_told:
            self._is_told = True
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, deadline: float) -> None:
        """Wait for a change. The caller looks at all states afterwards.

        Raises:
            ApiError: If time is over.
        """
        try:
            await asyncio.wait_for(self._event.wait(), max(0.0, deadline - time.monotonic()))
        except asyncio.TimeoutError as error:
            raise ApiError(504, "the request took longer than this server allows.") from error
        self._event.clear()
        self._is_told = False


class Reader:
    """Follows a request by its last state alone: memory does not depend on how fast a client reads.

    Args:
        stepping: The engine's thread.
        tokens: Token ids.
        sampling: How tokens are chosen.
        num_scored: Number of last tokens to score.
        images: Images of the prompt.
        follows: Whether each step's state is wanted. False: the last state alone.
        news: Told of changes. None: the reader's own.

    Raises:
        ApiError: If the engine has failed or ends.
    """

    def __init__(
        self,
        stepping: Stepping,
        tokens: list[int],
        sampling: Sampling,
        num_scored: int = 0,
        *,
        images: PromptImages | None = None,
        follows: bool = False,
        news: News | None = None,
    ) -> None:
        self._stepping = stepping
        self._follows = follows
        self._news = news or News()
        self.last = Written()
        """State of the request so far."""
        self._newest: Written | ApiError = self.last
        try:
            self._number = stepping.add(tokens, sampling, num_scored, self._tell, images)
        except ConfigError as error:
            raise ApiError(503, str(error)) from error

    def _tell(self, request: Request | ConfigError | None) -> None:
        """Keep a copy of the request's state. Called from the stepping thread."""
        if isinstance(request, Request) and request.reason is None and not self._follows:
            return  # waking the event loop for each request would slow every step
        self._newest = _state_of(request)
        self._news.tell()

    def take(self) -> bool:
        """Take the last state. Return whether there is a new one.

        Raises:
            ApiError: If the engine or the request has failed.
        """
        newest = self._newest
        if isinstance(newest, ApiError):
            raise newest
        is_new = newest is not self.last
        self.last = newest
        return is_new

    def give_up(self) -> None:
        """End the request, unless already ended."""
        if self.last.reason is None:
            self._stepping.give_up(self._number)


class ReaderGroup:
    """Readers of the texts of a client's request."""

    def __init__(self) -> None:
        self.news = News()
        """Told of changes by the readers."""
        self._readers: list[Reader | None] = []

    def add(self, reader: Reader | None) -> None:
        """Follow a reader. None takes the place of a text without new tokens."""
        self._readers.append(reader)

    @property
    def states(self) -> list[Written]:
        """State of each request so far."""
        return [
            Written(reason="length") if reader is None else reader.last for reader in self._readers
        ]

    async def changes(self, deadline: float) -> AsyncIterator[int]:
        """Yield the indices of requests with a new state, up to the ends of all requests.

        Raises:
            ApiError: If the engine or a request has failed, or time is over.
        """
        while any(state.reason is None for state in self.states):
            await self.news.wait(deadline)
            for index, reader in enumerate(self._readers):
                if reader is not None and reader.take():
                    yield index

    async def end(self, deadline: float) -> None:
        """Wait for the ends of all requests."""
        async for _ in self.changes(deadline):
            pass

    def give_up(self) -> None:
        """End the requests, unless already ended."""
        for reader in self._readers:
            if reader is not None:
                reader.give_up()


def _state_of(request: Request | ConfigError | None) -> Written | ApiError:
    if request is None:
        return ApiError(503, "the engine has ended, and with it this request.")
    if isinstance(request, ConfigError):
        return ApiError(400, str(request))
    if request.reason == NOT_FINITE:
        return ApiError(500, "the model's logits for this text are not finite, so it cannot go on.")
    return Written(request.new_tokens, list(request.logprobs), list(request.best), request.reason)
