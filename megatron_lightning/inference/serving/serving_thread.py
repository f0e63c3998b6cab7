"""Steps of a serving engine: one thread a rank.

The first rank sends new requests and cancelled requests to the other ranks, so that all ranks run
the same scheduler. While there is no work, the first rank sleeps, and the other ranks wait for the
first rank's next message.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_lightning.data.images.image_prompts import PromptImages
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.engine.request_batch import Request
from megatron_lightning.inference.engine.scheduler import Scheduler
from megatron_lightning.inference.engine.text_model import TextModel
from megatron_lightning.inference.engine.uncached_loop import Sampling

_HEARTBEAT_S = 10.0  # well below the timeout of idle collectives
_STEPS = 4  # of a pipeline's run, before new requests are seen


@dataclass(frozen=True)
class Order:
    """A request on the way to other ranks."""

    number: int
    tokens: list[int]
    sampling: Sampling
    num_scored: int
    has_images: bool = False
    """Whether the first rank keeps images of the prompt."""


@dataclass
class News:
    """Message from the first rank to the other ranks."""

    orders: list[Order] = field(default_factory=list)
    given_up: list[int] = field(default_factory=list)
    stops: bool = False


Sink = Callable[[Request | ConfigError | None], object]
"""Called from the stepping thread with the request after each step, or with the reason for refusing
the request. None: the engine has failed."""


class Stepping:
    """Runs requests of other threads.

    Args:
        engine: The engine of a replica.
        max_queue: Running and waiting requests, at most.
    """

    def __init__(self, engine: TextModel, max_queue: int) -> None:
        self.engine: Any = engine
        self.failure: BaseException | None = None
        """Reason for taking no more requests. None: all is well."""
        self.max_queue = max_queue
        """Running and waiting requests, at most."""
        self._news = News()
        self._sinks: dict[int, Sink] = {}
        self._images: dict[int, PromptImages] = {}
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        self._ready = threading.Event()
        self.longest = engine.longest
        """Longest text in tokens for both model and cache. Known once the engine is ready."""

    @property
    def room(self) -> int:
        """Number of further requests taken now."""
        return self.max_queue - len(self._sinks)

    @property
    def image_bytes(self) -> int:
        """Bytes of the images of waiting requests. Texts of one prompt share them."""
        with self._wake:
            return sum({id(one): one.num_bytes for one in self._images.values()}.values())

    def add(
        self,
        tokens: list[int],
        sampling: Sampling,
        num_scored: int,
        sink: Sink,
        images: PromptImages | None = None,
    ) -> int:
        """Run a request. Return the number of the request.

        Raises:
            ConfigError: If the engine has failed or ends.
        """
        with self._wake:
            if self.failure is not None or self._news.stops:
                raise ConfigError("the server ends, and takes no further request.")
            number = next(self._numbers)
            self._sinks[number] = sink
            if images is not None:
                self._images[number] = images
            order = Order(number, tokens, sampling, num_scored, has_images=images is not None)
            self._news.orders.append(order)
            self._wake.notify()
        return number

    def give_up(self, number: int) -> None:
        """Give a request up: nobody reads the text."""
        with self._wake:
            self._images.pop(number, None)
            if self._sinks.pop(number, None) is not None:
                self._news.given_up.append(number)
                self._wake.notify()

    def wait_until_ready(self) -> None:
        """Wait until the engine takes requests, or has failed."""
        self._ready.wait()

    def end(self) -> None:
        """End the threads of all ranks after the step at hand."""
        with self._wake:
            self._news.stops = True
            self._wake.notify()

    def run(self) -> None:
        """Step until the first rank ends. The body of the thread of every rank."""
        try:
            self._step_until_end()
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self._ready.set()
            with self._wake:
                sinks, self._sinks = list(self._sinks.values()), {}
            for sink in sinks:
                sink(None)

    def _step_until_end(self) -> None:
        """Step until the first rank ends, together with the other ranks."""
        with self.engine.active() as scheduler:
            self.longest = min(self.longest, scheduler.allocator.capacity)
            self._ready.set()
            self._run(scheduler)

    def _run(self, scheduler: Scheduler) -> None:
        world, live = self.engine.context.axis("world"), dict[int, Request]()
        while True:
            news = self._collect(is_busy=bool(live)) if self.engine.context.rank == 0 else News()
            news = world.broadcast_object(news)
            if news.stops:
                return
            for order in news.orders:
                self._begin(order, scheduler, live)
            for number in news.given_up:
                if number in live:
                    scheduler.abort(live.pop(number))
            if live:
                self.engine.step(_STEPS)
                self._report(live)

    def _begin(self, order: Order, scheduler: Scheduler, live: dict[int, Request]) -> None:
        """Add a request. Every rank refuses the same requests."""
        try:
            request = self._request_of(order)
            scheduler.add(request)
        except ConfigError as error:
            self._refuse(order.number, error)
            return
        live[order.number] = request

    def _request_of(self, order: Order) -> Request:
        request: Request = self.engine.requests.one(
            order.tokens, sampling=order.sampling, num_scored=order.num_scored
        )
        return request

    def _refuse(self, number: int, error: ConfigError) -> None:
        sink = self._sinks.pop(number, None)
        if sink is not None:
            sink(error)

    def _collect(self, *, is_busy: bool) -> News:
        """Return the news. Wait for news while there is no work."""
        with self._wake:
            if not (is_busy or self._news.orders or self._news.given_up or self._news.stops):
                self._wake.wait(_HEARTBEAT_S)
            news, self._news = self._news, News(stops=self._news.stops)
            return news

    def _report(self, live: dict[int, Request]) -> None:
        """Report the progress of requests to readers. Forget ended requests."""
        for number, request in list(live.items()):
            sink = self._sinks.get(number)
            if sink is not None:
                sink(request)
            if request.reason is not None:
                del live[number]
                self._sinks.pop(number, None)


def start(stepping: Stepping, on_failure: Callable[[], Any]) -> threading.Thread:
    """Run the steps in a thread. ``on_failure`` is called if the steps fail."""

    def body() -> None:
        try:
            stepping.run()
        except BaseException:
            on_failure()
            raise

    thread = threading.Thread(target=body, name="megatron-lightning-steps", daemon=True)
    thread.start()
    return thread
