"""Texts of a serving model with a ``generate`` of its own: one after another, on every rank."""

from __future__ import annotations

import logging

import torch

from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.engine.request_batch import Request
from megatron_lightning.inference.serving.serving_thread import News, Order, Stepping

_log = logging.getLogger(__name__)
_REFUSALS = (ValueError, RuntimeError, TypeError, IndexError)
"""Errors of a model about its inputs. Every rank raises alike."""
_FAILURES = (torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError)
"""Errors of a device or of a connection, perhaps on a single rank."""


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
        """Write a text to its end. Every rank refuses the same requests, and goes on."""
        try:
            request = self._request_of(order)
            self.engine.run([request], lambda _: self._tell(order.number, request))
        except _FAILURES:
            raise
        except ConfigError as error:
            self._refuse(order.number, error)
        except _REFUSALS as error:
            _log.exception("a request has failed, and others go on")
            reason = f"the model cannot answer this prompt ({type(error).__name__}: {error})."
            self._refuse(order.number, ConfigError(reason))

    def _tell(self, number: int, request: Request) -> None:
        has_ended = request.reason is not None
        sink = self._sinks.pop(number, None) if has_ended else self._sinks.get(number)
        if sink is not None:
            sink(request)
