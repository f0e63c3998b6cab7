"""Texts of a serving model with a ``generate`` of its own: one after another, on every rank."""

from __future__ import annotations

from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.engine.request_batch import Request
from megatron_lightning.inference.serving.serving_thread import News, Order, Stepping


class OwnStepping(Stepping):
    """Runs requests of other threads, each alone."""

    def _step_until_end(self) -> None:
        self._ready.set()
        world, waiting = self.engine.context.axis("world"), list[Order]()
        while True:
            news = self._collect(is_busy=bool(waiting)) if self.engine.context.rank == 0 else News()
            news = world.broadcast_object(news)
            if news.stops:
                return
            given_up = set(news.given_up)
            waiting = [one for one in (*waiting, *news.orders) if one.number not in given_up]
            if waiting:
                self._write(waiting.pop(0))

    def _write(self, order: Order) -> None:
        """Write a text to its end. Every rank refuses the same requests."""
        try:
            request = self._request_of(order)
            self.engine.run([request], lambda _: self._tell(order.number, request))
        except ConfigError as error:
            self._refuse(order.number, error)

    def _tell(self, number: int, request: Request) -> None:
        has_ended = request.reason is not None
        sink = self._sinks.pop(number, None) if has_ended else self._sinks.get(number)
        if sink is not None:
            sink(request)
