"""Rewards of answers, by functions of users: ordinary ones in threads, or asynchronous ones.

A function that raises, takes too long, or returns None leaves its answer without this reward. It is
counted, and the training continues. A thread cannot be ended: one that never returns is left alone.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import math
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron_lightning.errors import ConfigError

_log = logging.getLogger(__name__)

_AT_ONCE = 32
Answer = tuple[Any, Any, Mapping[str, Any]]
"""Prompt, answer and row: the arguments of a function."""


class Rewards:
    """Functions ``reward(prompt, answer, row) -> float | None`` by name.

    An object with ``is_serial = True`` is called by one thread at a time, and the time of a call
    begins with the call. Its method ``load()`` is called before, without a limit.

    Args:
        functions: Functions, classes of objects that are called, or their class paths, with
            arguments as ``{"class_path": ..., "init_args": {...}}``; by name, or named by
            themselves.
        timeout_s: Seconds after which an answer has no reward.

    Raises:
        ConfigError: If there is no such function, or two have a name.
    """

    def __init__(self, functions: Mapping[str, Any] | Sequence[Any], timeout_s: float) -> None:
        named = (
            list(functions.items())
            if isinstance(functions, Mapping)
            else [(_name_of(one), one) for one in functions]
        )
        self.functions: dict[str, Callable[..., Any]] = {}
        """Functions by name."""
        for name, one in named:
            if name in self.functions:
                raise ConfigError(
                    f"two rewards have the name {name}. Set rewards to a mapping of names."
                )
            self.functions[name] = _imported(one)
        self._timeout_s = timeout_s
        self._loading = threading.Lock()  # generations ahead score in threads of their own
        self._locks = {
            name: threading.Lock()
            for name, one in self.functions.items()
            if getattr(one, "is_serial", False)
        }

    def __reduce__(self) -> Any:
        """Go to other processes without locks."""
        return type(self), (self.functions, self._timeout_s)

    def score(
        self, answers: Sequence[Answer]
    ) -> tuple[list[dict[str, float | None]], Counter[str]]:
        """Return the rewards of every answer by name, and how often and why some are missing."""
        with self._loading:
            for name in self._locks:
                function: Any = self.functions[name]
                function.load()
        found: list[Any] = []

        def body() -> None:
            found.append(asyncio.run(self._all(answers)))

        # A loop in a thread of its own: the caller's may be running, as in notebooks.
        thread = threading.Thread(target=body, name="rewards")
        thread.start()
        thread.join()
        if not found:
            raise RuntimeError("the thread of the rewards has failed; its error is printed above")
        results, failures = found[0]
        return results, failures

    async def _all(
        self, answers: Sequence[Answer]
    ) -> tuple[list[dict[str, float | None]], Counter[str]]:
        failures: Counter[str] = Counter()
        traces: dict[str, str] = {}
        limit = asyncio.Semaphore(_AT_ONCE)
        alone = {name: asyncio.Semaphore(1) for name in self._locks}

        async def one(name: str, answer: Answer) -> float | None:
            async with alone.get(name, limit):
                try:
                    result = await self._result(name, answer)
                    value = None if result is None else float(result)
                except asyncio.TimeoutError:
                    failures["timed_out"] += 1
                    return None
                except Exception as error:
                    kind = f"raised_{type(error).__name__}"
                    failures[kind] += 1
                    traces.setdefault(kind, "".join(traceback.format_exception(error)))
                    return None
            if value is None or not math.isfinite(value):
                failures["none"] += 1
                return None
            return value

        names = list(self.functions)
        calls = [one(name, answer) for answer in answers for name in names]
        values = await asyncio.gather(*calls)
        for kind, trace in traces.items():
            _log.warning(
                "A reward has failed. Its answers stay without it, and are counted as "
                "reward_failures/%s:\n%s", kind, trace,
            )  # fmt: skip
        count = len(names)
        return [
            dict(zip(names, values[start : start + count], strict=True))
            for start in range(0, len(values), count or 1)
        ], failures

    async def _result(self, name: str, answer: Answer) -> Any:
        """Return the result of a function, which runs in a thread unless it is asynchronous."""
        function, lock = self.functions[name], self._locks.get(name)
        call = function if inspect.isroutine(function) else type(function).__call__
        if inspect.iscoroutinefunction(call):
            return await asyncio.wait_for(function(*answer), self._timeout_s)
        begun, future = _in_thread(function, answer, lock or nullcontext())
        try:  # a call that was given up may still have the lock
            await asyncio.wait_for(begun, self._timeout_s)
        except asyncio.TimeoutError:
            future.cancel()
            raise
        return await asyncio.wait_for(future, self._timeout_s)


def _in_thread(
    function: Callable[..., Any], answer: Answer, lock: AbstractContextManager[Any]
) -> tuple[asyncio.Future[None], asyncio.Future[Any]]:
    """Call a function in a thread. Return when it begins, and its result.

    Args:
        function: The function.
        answer: Its arguments.
        lock: Held by the call. A result that nobody waits for any more is not computed.
    """
    loop = asyncio.get_running_loop()
    begun: asyncio.Future[None] = loop.create_future()
    future: asyncio.Future[Any] = loop.create_future()

    def tell(told: asyncio.Future[Any], method: Callable[[Any], None], value: Any) -> None:
        if not told.done():
            method(value)

    def body() -> None:
        try:
            with lock:
                if future.done():
                    return
                loop.call_soon_threadsafe(tell, begun, begun.set_result, None)
                try:
                    outcome: tuple[Callable[[Any], None], Any] = (
                        future.set_result,
                        function(*answer),
                    )
                except BaseException as error:  # of a user, in a thread that nobody watches
                    outcome = (future.set_exception, _as_exception(error))
            loop.call_soon_threadsafe(tell, future, *outcome)
        except RuntimeError:  # the loop has ended without it
            return

    # A daemon: a function that hangs must not keep the process from ending.
    threading.Thread(target=body, name="reward", daemon=True).start()
    return begun, future


def _as_exception(error: BaseException) -> Exception:
    # Futures take no StopIteration.
    is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
    return error if is_plain else RuntimeError(repr(error))  # type: ignore[return-value]


def _name_of(one: Any) -> str:
    if isinstance(one, Mapping):
        one = str(one.get("class_path"))
    if isinstance(one, str):
        return one.rpartition(".")[2]
    return getattr(one, "__name__", type(one).__name__)


def _imported(one: Any) -> Callable[..., Any]:
    options: dict[str, Any] = {}
    if isinstance(one, Mapping):
        options, one = dict(one.get("init_args") or {}), str(one.get("class_path"))
    if isinstance(one, str):
        module, _, name = one.rpartition(".")
        try:
            one = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"the reward {one!r} cannot be imported ({error}). Set it to the class path of a "
                "function reward(prompt, answer, row), such as my_rewards.is_right."
            ) from error
    if options and not inspect.isclass(one):
        raise ConfigError(f"the reward {one!r} is no class, and has init_args. Leave them out.")
    one = one(**options) if inspect.isclass(one) else one
    if not callable(one):
        raise ConfigError(f"the reward {one!r} is no function. Set it to one, or to a class path.")
    found: Callable[..., Any] = one
    return found
