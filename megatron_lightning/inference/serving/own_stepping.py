"""Texts of a serving model with a ``generate`` of its own: one after another, on every rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.inference.engine.request_batch import Request
from megatron_lightning.inference.serving.serving_thread import News, Order, Stepping

_log = logging.getLogger(__name__)
_REFUSALS = (ValueError, RuntimeError, TypeError, IndexError)
"""Errors of a model about its inputs. Every rank raises alike."""
_FAILURES = (torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError)
"""Errors of a device or of a connection, perhaps on a single rank."""
_LOOK = 8
"""Tokens of a text between looks at whether somebody still reads it."""


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
            if news.weights is not None:
                self._take(news.weights)
            given_up = set(news.given_up)
            waiting = [one for one in (*waiting, *news.orders) if one.number not in given_up]
            if waiting:
                self._write(waiting.pop(0))

    def _write(self, order: Order) -> None:
        """Write a text to its end. Every rank refuses the same requests, and goes on."""
        try:
            request = self._request_of(order)
            if order.has_images:
                self.engine.add_images(request, self._entries(order.number))
            self.engine.run([request], lambda _: self._tell(order.number, request))
        except _FAILURES:
            raise
        except ConfigError as error:
            self._refuse(order.number, error)
        except _REFUSALS as error:
            _log.exception("a request has failed, and others go on")
            self._refuse(order.number, _refusal(error))

    def _entries(self, number: int) -> Mapping[str, Any]:
        """Return the entries of a prompt's images, which the first rank makes.

        Raises:
            ConfigError: If an image cannot be decoded.
        """
        made: Mapping[str, Any] | ConfigError | None = None
        if self.engine.context.rank == 0:
            with self._wake:
                images = self._images.pop(number, None)  # None: given up
            try:
                made = None if images is None else images.entries()
            except DataError as error:
                made = ConfigError(str(error))
            except _REFUSALS as error:
                made = _refusal(error)
        made = self.engine.context.axis("world").broadcast_object(made)
        if isinstance(made, ConfigError):
            raise made
        if made is None:
            raise ConfigError("the request was given up")
        return made

    def _tell(self, number: int, request: Request) -> None:
        request.note_step(None if self.weights is None else self.weights.step)
        if request.reason is None and len(request.new_tokens) % _LOOK == 0:
            is_read = number in self._sinks  # of the first rank
            if not self.engine.context.axis("world").broadcast_object(is_read):
                request.reason = "abort"
        has_ended = request.reason is not None
        sink = self._sinks.pop(number, None) if has_ended else self._sinks.get(number)
        if sink is not None:
            sink(request)


def _refusal(error: Exception) -> ConfigError:
    return ConfigError(f"the model cannot answer this prompt ({type(error).__name__}: {error}).")
