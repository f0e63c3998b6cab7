"""Generations that generators sample ahead of the updates.

Generation i begins once the weights that generation i - 1 - ``max_staleness`` has trained are
served, and is trained in its turn. No row is older than the bound, then, and none is dropped for
being slow: weights that arrive while a text is written only make it younger.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait

from megatron_lightning.data.order.reading_thread import device_of_thread, use_device
from megatron_lightning.data.rollouts.generation import Generation
from megatron_lightning.data.rollouts.prompts import Prompt
from megatron_lightning.inference.serving.new_weights import Version
from megatron_lightning.modules.post_training.generators.client import Generator, api_key
from megatron_lightning.modules.post_training.generators.policy_fit import PolicyFit
from megatron_lightning.modules.post_training.generators.published_weights import PublishedWeights
from megatron_lightning.modules.post_training.generators.remote_engine import (
    Generators,
    RemoteEngine,
)
from megatron_lightning.modules.post_training.generators.replica_rows import (
    Alone,
    Groups,
    PromptBatch,
    Replica,
    ReplicaRows,
)

_CLOSE_S = 10.0
"""Seconds that the end of a fit waits for texts on the way."""
Found = tuple[Groups, Counter[str]]
Work = tuple[Mapping[int, Prompt], Mapping[int, int]]
"""Prompts of this replica by their places, and seeds of their first answers."""


class Ahead:
    """Samples generations by generators.

    Args:
        fit: The fit.
        team: Ranks of the replica.
        work: Returns the work of this replica in a generation.
    """

    def __init__(self, fit: PolicyFit, team: Replica, work: Callable[[int], Work]) -> None:
        options, key = fit.data.options, api_key()
        self._fit = fit
        self._options = options
        self._team = team
        self._work = work
        self._published = PublishedWeights(
            fit.trainer.strategy,
            fit.model,
            str(options.weights_folder),
            fit.run,
            # A generator may still read those that the oldest generation under way begins with.
            kept=2 + options.max_staleness,
        )
        if team.is_first:  # cached properties have no lock, and generations read them in threads
            _ = fit.data.prompts, fit.data.rewards
            if options.environment is not None:
                _ = fit.data.environment
        self._rows = ReplicaRows(fit, Alone())
        self._generators = Generators(
            [Generator(url, key) for url in options.generators or ()], options.generator_timeout_s
        )
        if fit.trainer.is_global_zero:  # last: an error above leaves nothing to close
            self._published.begin()
        self._begun: dict[int, Future[Found]] = {}
        self._generation_of: dict[int, int] = {}  # step of weights -> generation that they begin
        self._newest: Version | None = None
        self._seconds: dict[str, float] = {}

    def begin(self, number: int) -> None:
        """Serve the weights before generation ``number``, and begin the generations that the bound
        allows. A collective of all ranks.
        """
        start = time.monotonic()
        version = self._published.write(self._fit.trainer.global_step)
        self._team.from_first(lambda: self._serve(version))
        self._generation_of[version.step] = number
        self._newest = version
        self._seconds["transfer_s"] = time.monotonic() - start
        if self._fit.trainer.is_global_zero:
            self._published.remove()
        if self._team.is_first:
            # At the end of an epoch numbers may jump, and nobody trains those between.
            self._begun = {n: found for n, found in self._begun.items() if n >= number}
            last = min(number + self._options.max_staleness, self._last(number))
            for further in range(number, last + 1):
                if further not in self._begun:
                    self._begun[further] = _in_thread(lambda n=further: self._sample(n))  # type: ignore[misc]

    def close(self, *, has_failed: bool = False) -> None:
        """End generations that nobody trains, which close their environments, and remove the
        folders of weights. A fit that has failed waits for nothing.
        """
        self._generators.close()
        wait(self._begun.values(), timeout=0.0 if has_failed else _CLOSE_S)
        if self._fit.trainer.is_global_zero:
            self._published.remove(all_of_them=True)

    def _serve(self, version: Version) -> None:
        if self._fit.trainer.is_global_zero:
            self._generators.serve(version)
        else:  # the first replica tells them; one that has come back later learns it here
            self._generators.newest = version

    def _last(self, number: int) -> int:
        """Return the number of the last generation of the fit, or of an epoch that is cut short."""
        trainer, data = self._fit.trainer, self._fit.data
        updates = data.updates_of_generation
        by_steps: float = math.inf
        if trainer.max_steps >= 0:
            by_steps = number + math.ceil((trainer.max_steps - trainer.global_step) / updates) - 1
        by_epochs: float = math.inf
        if trainer.max_epochs is not None and trainer.max_epochs >= 0:
            by_epochs = data.number_of(0, trainer.max_epochs) - 1
        epoch, batches = trainer.current_epoch, updates * trainer.accumulate_grad_batches
        end = data.number_of(math.ceil(trainer.num_training_batches / batches), epoch)
        if end < data.number_of(0, epoch + 1):  # by limit_train_batches: numbers jump
            by_epochs = min(by_epochs, end - 1)
        last = min(by_steps, by_epochs)
        return number + self._options.max_staleness if last == math.inf else int(last)

    def rows(self, number: int) -> Found:
        """Return the rows of this replica in a generation. Called by the first rank alone."""
        start = time.monotonic()
        found = self._begun.pop(number).result()
        self._seconds["waited_s"] = time.monotonic() - start
        return found

    def _sample(self, number: int) -> Found:
        prompts, seeds = self._work(number)
        return self.sampled(number, prompts, seeds)

    def sampled(
        self, number: int, prompts: Mapping[int, Prompt], seeds: Mapping[int, int]
    ) -> Found:
        """Return rows of prompts of a generation, by the newest weights that are served."""
        version = self._newest
        if version is None:
            raise RuntimeError("a generation began before weights were served")
        engine = RemoteEngine(self._generators, self._fit.data.end_ids, version)
        first = number * self._fit.data.num_prompts
        return self._rows.sample(engine, PromptBatch(version.step, first, prompts, seeds))

    def statistics(self, number: int, generation: Generation) -> dict[str, float]:
        """Return values of a generation for the log: the mean and the maximum of the generations
        between the weights of a token and its training, and times.

        Raises:
            RuntimeError: If a token is older than the bound.
        """
        ages = [
            number - self._generation_of[step]
            for row in generation.rows
            for step in row.steps
            if step is not None
        ]
        oldest = max(ages, default=0)
        if oldest > self._options.max_staleness:
            raise RuntimeError(
                f"generation {number} has a token of {oldest} generations before, beyond "
                f"max_staleness={self._options.max_staleness}"
            )
        return {
            "staleness": sum(ages) / max(len(ages), 1),
            "staleness_max": float(oldest),
            "asked_again": float(self._team.total(self._generators.asked_again)),
            **self._seconds,
        }


def _in_thread(call: Callable[[], Found]) -> Future[Found]:
    """Call a function in a thread, with this thread's device."""
    future: Future[Found] = Future()
    device = device_of_thread()

    def body() -> None:
        try:
            use_device(device)
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, daemon=True, name="generation").start()
    return future
