"""Environments of users: a class with ``reset`` and ``step``, an object for each sample.

An object lives in a thread of its own, which makes all its calls, ordinary or asynchronous ones.
Calls are bounded from outside: an environment that raises, takes too long or returns nothing is
given up, and ``close`` is called in any case. A thread cannot be ended: one that never returns is
left alone, and ``close`` is then called from another.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from megatron_lightning.errors import ConfigError

_log = logging.getLogger(__name__)

Message = Mapping[str, Any]
Reward = float | Mapping[str, float | None] | None


class Turn(NamedTuple):
    """Answer of an environment to an answer of the model."""

    messages: Sequence[Message] = ()
    """Messages behind the answer, such as a tool's. Empty: the conversation ends."""
    reward: Reward = None
    """Added to the rewards of the earlier turns. A mapping has several by name."""
    done: bool = False
    """Whether the conversation ends here."""
    answer: Message | None = None
    """The answer as a message, for templates that need its calls or its reasoning as fields.
    Default: the text as content."""


class Environment(Protocol):
    """Methods of an environment, ordinary or asynchronous. ``end() -> reward`` behind the last
    turn and ``close()`` are optional, and so is ``tools``, schemas for the chat template.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message] | None:
        """Return the first messages. None: those of the row."""

    def step(self, messages: Sequence[Message], answer: str) -> Turn:
        """Return what follows an answer of the model behind ``messages``."""


class Outcome(NamedTuple):
    """Result of a call."""

    value: Any
    failure: str | None
    """Kind of the failure. None: there is none."""


class Hosted:
    """An environment in a thread of its own.

    Args:
        make: Makes the environment.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._environment: Any = None
        self._jobs: SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None] = SimpleQueue()
        self._cancel: Callable[[], object] = lambda: None
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def call(self, function: Callable[[Any], Any]) -> Future[Any]:
        """Call ``function(environment)`` behind earlier calls."""
        future: Future[Any] = Future()
        self._jobs.put((function, future))
        return future

    def give_up(self) -> None:
        """Cancel the call at hand, if it is asynchronous."""
        self._cancel()

    def close(self) -> Future[Any]:
        """Close the environment behind earlier calls, and end its thread."""
        future = self.call(_close)
        self._jobs.put(None)
        return future

    def close_elsewhere(self) -> Future[Any]:
        """Close an environment whose thread hangs."""
        future: Future[Any] = Future()
        environment = self._environment
        if environment is None:  # its constructor hangs
            future.set_result(None)
            return future
        other = Hosted(self._make)
        other._environment = environment
        return other.close()

    def _work(self) -> None:
        loop = asyncio.new_event_loop()
        while (job := self._jobs.get()) is not None:
            function, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if self._environment is None and function is not _close:
                    self._environment = self._make()
                result = function(self._environment)
                if inspect.isawaitable(result):
                    result = self._awaited(loop, result)
                future.set_result(result)
            except BaseException as error:  # of a user, in a thread that nobody watches
                future.set_exception(error)
        loop.close()

    def _awaited(self, loop: asyncio.AbstractEventLoop, result: Any) -> Any:
        task = loop.create_task(_result_of(result))

        def cancel() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)

        self._cancel = cancel
        try:
            return loop.run_until_complete(task)
        finally:
            self._cancel = lambda: None


async def _result_of(awaitable: Any) -> Any:
    return await awaitable


def _close(environment: Any) -> Any:
    close = getattr(environment, "close", None)
    return close() if callable(close) else None


def call_all(
    calls: Mapping[int, tuple[Hosted, Callable[[Any], Any]]],
    name: str,
    timeout_s: float,
    failures: Counter[str],
) -> dict[int, Outcome]:
    """Call environments together; count failures by kind, and log the first of each kind.

    Args:
        calls: Environments and functions by number.
        name: Of the call, in the kinds of failures.
        timeout_s: Seconds after which calls are given up.
        failures: Counts by kind.
    """
    futures = {number: hosted.call(function) for number, (hosted, function) in calls.items()}
    wait(futures.values(), timeout=timeout_s)
    results: dict[int, Outcome] = {}
    for number, future in futures.items():
        if not future.done():
            future.cancel()
            calls[number][0].give_up()
            results[number] = Outcome(None, f"{name}_timed_out")
        elif (error := future.exception()) is not None:
            kind = f"{name}_raised_{type(error).__name__}"
            if kind not in failures and not any(kind == one.failure for one in results.values()):
                _log.warning(
                    "An environment has failed. Its sample has no rewards, and is counted as "
                    "environment_failures/%s:\n%s",
                    kind,
                    "".join(traceback.format_exception(error)),
                )
            results[number] = Outcome(None, kind)
        else:
            results[number] = Outcome(future.result(), None)
    failures.update(one.failure for one in results.values() if one.failure is not None)
    return results


def close_all(environments: Sequence[Hosted], timeout_s: float, failures: Counter[str]) -> None:
    """Close environments together, also those whose threads hang."""
    closing = {number: one.close() for number, one in enumerate(environments)}
    wait(closing.values(), timeout=timeout_s)
    late = [number for number, future in closing.items() if future.cancel()]
    closing |= {number: environments[number].close_elsewhere() for number in late}
    wait(closing.values(), timeout=timeout_s)
    for future in closing.values():
        if not future.done():
            failures["close_timed_out"] += 1
        elif not future.cancelled() and (error := future.exception()) is not None:
            failures[f"close_raised_{type(error).__name__}"] += 1


def imported(source: Any, what: str) -> Any:
    """Return an object by its class path. Other objects are returned as they are.

    Raises:
        ConfigError: If there is no such object.
    """
    if not isinstance(source, str):
        return source
    module, _, name = source.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"the {what} {source!r} cannot be imported ({error}). Set it to the class path of "
            f"one, such as my_{what}s.{what.capitalize()}."
        ) from error


def maker_of(environment: Any, options: Mapping[str, Any] | None) -> Callable[[], Any]:
    """Return a function that makes environments.

    Args:
        environment: A class or function, or its class path.
        options: Arguments.

    Raises:
        ConfigError: If there is no such class, or it has no ``reset`` and ``step``.
    """
    make = imported(environment, "environment")
    missing = [name for name in ("reset", "step") if not callable(getattr(make, name, None))]
    if not callable(make) or (inspect.isclass(make) and missing):
        raise ConfigError(
            f"the environment {environment!r} has no {' and no '.join(missing) or 'class'}. Set it "
            "to a class with reset(row, seed) -> messages and step(messages, answer) -> Turn, or "
            "for tools to megatron_lightning.modules.ToolEnvironment."
        )
    given = dict(options or {})
    return lambda: make(**given)
