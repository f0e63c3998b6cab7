"""Texts by several generators, as an engine of this process would write them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, NoReturn

from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.engine.text_model import Completion
from megatron_lightning.inference.engine.uncached_loop import Sampling
from megatron_lightning.inference.serving.new_weights import Version
from megatron_lightning.modules.post_training.generators.client import (
    AwayError,
    Generator,
    StaleError,
)

_log = logging.getLogger(__name__)
_PAUSE_S = 0.5


class Generators:
    """The generators of a fit, in the eyes of a replica. Calls may come from several threads.

    A generator that does not answer is *away*: it gets no texts until it has taken weights again,
    which a thread asks it for. A server that hangs costs its limit once.

    Args:
        generators: The servers.
        limit_s: Seconds that no generator may answer, before the fit ends.
    """

    def __init__(self, generators: Sequence[Generator], limit_s: float) -> None:
        self._generators = list(generators)
        self._limit_s = limit_s
        self.newest: Version | None = None
        """Weights for a generator that has older ones."""
        self._lock = threading.Lock()
        self._away: set[Generator] = set()
        self._last_error: AwayError | None = None
        self.asked_again = 0
        """Requests that another generator was asked for, or the same one once it was back."""
        self._has_ended = threading.Event()

    @property
    def present(self) -> list[Generator]:
        """Generators that are not away."""
        with self._lock:
            return [one for one in self._generators if one not in self._away]

    def close(self) -> None:
        """End with the fit: no further text is asked for."""
        self._has_ended.set()

    def serve(self, version: Version) -> None:
        """Make the generators take weights. Those that are away take them when they are back.

        Raises:
            ConfigError: If a generator refuses them, or none answers in time.
        """
        self.newest = version
        _together([lambda one=one: self._give(one, version) for one in self.present])  # type: ignore[misc]
        self._wait_for_one()

    def _give(self, generator: Generator, version: Version) -> None:
        try:
            generator.take_weights(version, self._limit_s)
        except AwayError as error:
            self._set_away(generator, error)

    def _set_away(self, generator: Generator, error: AwayError) -> None:
        """Give the generator no texts before a thread has brought it the newest weights."""
        with self._lock:
            self._last_error = error
            if generator in self._away:
                return
            self._away.add(generator)
        _log.warning("A generator is away, and gets no texts until it is back: %s", error)
        threading.Thread(
            target=self._bring_back, args=(generator,), daemon=True, name="generator"
        ).start()

    def _bring_back(self, generator: Generator) -> None:
        while not self._has_ended.wait(_PAUSE_S):
            if self.newest is None:
                continue
            try:
                generator.take_weights(self.newest, self._limit_s)
            except AwayError:
                continue
            except ConfigError as error:  # raised again by the next request
                _log.warning("A generator is back, and refuses the weights: %s", error)
            with self._lock:
                self._away.discard(generator)
            return

    def _wait_for_one(self) -> list[Generator]:
        """Return the generators that are not away, one at least.

        Raises:
            ConfigError: If all are away for too long.
            RuntimeError: If the fit has ended.
        """
        deadline = time.monotonic() + self._limit_s
        while not (found := self.present):
            if time.monotonic() > deadline:
                self._give_up()
            self._has_ended.wait(_PAUSE_S)
            self._check_fit()
        return found

    def _give_up(self) -> NoReturn:
        urls = ", ".join(one.url for one in self._generators)
        raise ConfigError(
            f"no generator ({urls}) has answered for {self._limit_s:g} s; the last error was: "
            f"{self._last_error}. Start them again, or raise generator_timeout_s."
        ) from self._last_error

    def _check_fit(self) -> None:
        if self._has_ended.is_set():
            raise RuntimeError("the fit has ended, and needs no further texts")

    def continue_each(
        self,
        prompts: Sequence[Sequence[int]],
        samplings: Sequence[Sampling],
        stops: Sequence[int],
        least: Version,
    ) -> list[Completion]:
        """Continue prompts. Every generator has a share. Where one ends, others have its share.

        Args:
            prompts: Ids of each prompt.
            samplings: Options of each prompt.
            stops: Ids that end a text.
            least: Weights that texts begin with: these, or later ones.
        """
        present = self._wait_for_one()
        count = min(len(present), len(prompts))
        # Neighbors are answers to the same prompt, and begin with the same keys.
        ends = [len(prompts) * number // count for number in range(count + 1)]
        shares = [range(*pair) for pair in pairwise(ends)]

        def ask(number: int) -> list[dict[str, Any]]:
            body = {
                "run": least.run,
                "step": least.step,
                "stops": list(stops),
                "requests": [
                    {
                        "prompt": list(prompts[place]),
                        "max_new_tokens": samplings[place].max_new_tokens,
                        "temperature": samplings[place].temperature,
                        "seed": samplings[place].seed,
                    }
                    for place in shares[number]
                ],
            }
            return self._ask(body, present[number])

        answers = _together([lambda n=n: ask(n) for n in range(len(shares))])  # type: ignore[misc]
        found: dict[int, Completion] = {}
        for share, texts in zip(shares, answers, strict=True):
            found |= {place: _completion_of(one) for place, one in zip(share, texts, strict=True)}
        return [found[place] for place in range(len(prompts))]

    def _ask(self, body: dict[str, Any], generator: Generator) -> list[dict[str, Any]]:
        """Return the texts of a generator, or of the next one that answers."""
        failures, deadline = 0, 0.0  # of the failures in a row
        while True:
            self._check_fit()
            try:
                return generator.continue_each(body, self._limit_s)
            except StaleError as error:
                if self.newest is None:
                    raise ConfigError(f"{generator.url}: {error}") from error
                self._give(generator, self.newest)
            except AwayError as error:
                self._set_away(generator, error)
                with self._lock:
                    self.asked_again += 1
                failures += 1
                deadline = deadline or time.monotonic() + self._limit_s
                if failures > len(self._generators) and time.monotonic() > deadline:
                    self._give_up()
            present = self._wait_for_one()
            if generator not in present:
                generator = present[failures % len(present)]


class RemoteEngine:
    """Engine of a generation.

    Args:
        generators: The generators.
        stops: Ids that end a text.
        least: Weights that texts begin with: these, or later ones.
    """

    def __init__(self, generators: Generators, stops: Sequence[int], least: Version) -> None:
        self._generators = generators
        self._stops = stops
        self._least = least

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        num_samples: int,
        *,
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        """See ``TextModel``."""
        texts = self.continue_each(
            [prompt for prompt in prompts for _ in range(num_samples)],
            [replace(sampling, seed=seed + n) for seed in seeds for n in range(num_samples)],
        )
        return [texts[at : at + num_samples] for at in range(0, len(texts), num_samples)]

    def continue_each(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]
    ) -> list[Completion]:
        """See ``TextModel``."""
        if not prompts:
            return []
        return self._generators.continue_each(prompts, samplings, self._stops, self._least)


def _completion_of(text: dict[str, Any]) -> Completion:
    ids, logprobs = [int(one) for one in text["ids"]], [float(one) for one in text["logprobs"]]
    end = (ids.pop(), logprobs.pop()) if text["ended"] else None
    return Completion(ids, logprobs, str(text["reason"]), end, steps=list(text["steps"]))


def _together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the results of calls in threads. The first error is raised once all have ended."""
    results: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()

    def body(number: int, call: Callable[[], Any]) -> None:
        try:
            results.put((number, call(), None))
        except BaseException as error:
            results.put((number, None, error))

    for number, call in enumerate(calls):
        threading.Thread(target=body, args=(number, call), daemon=True, name="generator").start()
    found = sorted((results.get() for _ in calls), key=lambda one: one[0])
    for _, _, error in found:
        if error is not None:
            raise error
    return [value for _, value, _ in found]
