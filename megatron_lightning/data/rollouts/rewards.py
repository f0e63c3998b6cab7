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
from typing import Any

from megatron_lightning.errors import ConfigError

_log = logging.getLogger(__name__)

_AT_ONCE = 32
Answer = tuple[Any, Any, Mapping[str, Any]]
"""Prompt, answer and row: the arguments of a function."""


class Rewards:
    """Functions ``reward(prompt, answer, row) -> float | None`` by name.

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

    def score(
        self, answers: Sequence[Answer]
    ) -> tuple[list[dict[str, float | None]], Counter[str]]:
        """Return the rewards of every answer by name, and how often and why some are missing."""
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

        async def one(function: Callable[..., Any], answer: Answer) -> float | None:
            async with limit:
                try:
                    result = await asyncio.wait_for(_called(function, answer), self._timeout_s)
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
        calls = [one(self.functions[name], answer) for answer in answers for name in names]
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


async def _called(function: Callable[..., Any], answer: Answer) -> Any:
    """Return the result of a function, which runs in a thread unless it is asynchronous."""
    call = function if inspect.isroutine(function) else type(function).__call__
    if inspect.iscoroutinefunction(call):
        return await function(*answer)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def tell(method: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            method(value)

    def body() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (future.set_result, function(*answer))
        except BaseException as error:  # of a user, in a thread that nobody watches
            outcome = (future.set_exception, _as_exception(error))
        try:
            loop.call_soon_threadsafe(tell, *outcome)
        except RuntimeError:  # the loop has ended without it
            return

    # A daemon: a function that hangs must not keep the process from ending.
    threading.Thread(target=body, name="reward", daemon=True).start()
    return await future


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
