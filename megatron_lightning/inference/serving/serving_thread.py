"""Steps of a serving engine: one thread a rank.

The first rank sends new requests and cancelled requests to the other ranks, so that all ranks run
the same scheduler. While there is no work, the first rank sleeps, and the other ranks wait for the
first rank's next message.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from megatron_lightning.data.images.image_prompts import PromptImages
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.inference.engine.request_batch import Request
from megatron_lightning.inference.engine.scheduler import Scheduler
from megatron_lightning.inference.engine.text_model import TextModel
from megatron_lightning.inference.engine.uncached_loop import Sampling
from megatron_lightning.inference.serving.new_weights import NewWeights, Version

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
    stops: frozenset[int] | None = None
    """End tokens of the text. None: the engine's."""


@dataclass
class News:
    """Message from the first rank to the other ranks."""

    orders: list[Order] = field(default_factory=list)
    given_up: list[int] = field(default_factory=list)
    weights: Version | None = None
    stops: bool = False

    @property
    def has_any(self) -> bool:
        """Whether there is something to do."""
        return bool(self.orders or self.given_up or self.weights or self.stops)


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
        self.weights: NewWeights | None = None
        """Takes new weights. None: the engine keeps its own."""
        self._taking: Future[Version] | None = None
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
        *,
        stops: frozenset[int] | None = None,
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
            has_images = images is not None
            order = Order(number, tokens, sampling, num_scored, has_images, stops)
            self._news.orders.append(order)
            self._wake.notify()
        return number

    def take_weights(self, version: Version) -> Future[Version]:
        """Take new weights between two steps. The result is the weights that the engine has then.

        Raises:
            ConfigError: If other weights are being taken, or the engine takes none.
        """
        with self._wake:
            if self.weights is None or self.failure is not None or self._news.stops:
                raise ConfigError("the server takes no weights now.")
            if self._taking is not None and not self._taking.done():
                raise ConfigError("the server is taking other weights. Try again later.")
            self._taking = Future()
            self._news.weights = version
            self._wake.notify()
            return self._taking

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
            if self._taking is not None and not self._taking.done():
                self._taking.set_exception(RuntimeError("the engine has ended."))

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
            if news.weights is not None and self._take(news.weights):
                scheduler.restart()
            for order in news.orders:
                self._begin(order, scheduler, live)
            for number in news.given_up:
                if number in live:
                    scheduler.abort(live.pop(number))
            if live:
                self.engine.step(_STEPS)
                self._report(live)

    def _take(self, version: Version) -> bool:
        """Read weights on all ranks, or on none. Return whether the engine has new ones."""
        world, weights, taking = self.engine.context.axis("world"), self.weights, self._taking
        if weights is None:
            raise RuntimeError("weights came to a server that takes none")
        if weights.version is not None and weights.version.reaches(version):
            if taking is not None:
                taking.set_result(weights.version)
            return False
        error: str | None = None
        try:
            read = weights.prepare(version)
        except (ConfigError, CheckpointError, OSError) as reason:
            error = str(reason)
        errors = [one for one in world.all_gather_object(error) if one is not None]
        if not errors:
            read()
        if taking is not None and errors:
            taking.set_exception(ConfigError(errors[0]))
        elif taking is not None:
            taking.set_result(version)
        return not errors

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
        if order.stops is not None:
            request.stops = order.stops
        return request

    def _refuse(self, number: int, error: ConfigError) -> None:
        sink = self._sinks.pop(number, None)
        if sink is not None:
            sink(error)

    def _collect(self, *, is_busy: bool) -> News:
        """Return the news. Wait for news while there is no work."""
        with self._wake:
            if not (is_busy or self._news.has_any):
                self._wake.wait(_HEARTBEAT_S)
            news, self._news = self._news, News(stops=self._news.stops)
            return news

    def _report(self, live: dict[int, Request]) -> None:
        """Report the progress of requests to readers. Forget ended requests."""
        step = None if self.weights is None else self.weights.step
        for number, request in list(live.items()):
            request.note_step(step)
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
