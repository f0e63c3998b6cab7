"""Compare values equal on all ranks beside batches and weights: options of optimizer groups, and
random states of a replica.

A hook or scheduler with different inputs on different ranks (a counter, an unsynchronized metric)
sets different learning rates. A hook with random draws on one rank only leaves different random
states, and random masks in the next step differ. Under a pipeline the last stage's digests travel
with the outputs of every step, and each other stage compares these digests with its own. All ranks
compare at the first two batches of a run, at the first batch of each epoch and at the first batch
after a validation.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_lightning.assembly.checks.replicas import diverged
from megatron_lightning.errors import ShardingError
from megatron_lightning.guards.guard import Fit, Guard
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.random.rng import get_generator_state
from megatron_lightning.step.participant import StepBatch
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.step_run import StepRun


class RankAgreement(Guard):
    """Digests of one rank at the beginning of a step, and the comparison of digests."""

    sentence = (
        "options of optimizer groups, or states of random generators, differ between ranks that "
        "work on one batch: a hook or a scheduler saw other values, or drew on some ranks only"
    )

    def __init__(self, scope: RunContext, fit: Fit | None = None) -> None:
        super().__init__(scope, fit)
        self._context = scope.context
        self._devices = [torch.device("cpu")]
        if self._context.device.type == "cuda":
            self._devices.append(self._context.device)
        self._num_batches = 0
        self._options: dict[str, float] = {}
        self._digest = 0
        self._groups_of_stage = False
        """Whether stages have different groups by design, such as a group for each parameter."""
        self._random = 0

    @classmethod
    def applies(cls, scope: RunContext, fit: Fit | None) -> bool:
        """Return whether there are several ranks."""
        return scope.context.world_size > 1

    def begin_batch(self, batch: StepBatch) -> None:
        """Record the state at the beginning of a batch. A collective at some training batches.

        Raises:
            ShardingError: If the state differs between ranks.
        """
        if self._context.layout.model_parallel_size * self._context.cp.size > 1:
            self._random = _random_digest(self._devices)
        if not batch.trains:
            return
        options = dict(_options_of(self.scope.module.trainer.optimizers))
        if options != self._options:
            self._options, self._digest = options, _digest(options)
        self._num_batches += 1
        if batch.compares or self._num_batches <= 2:
            self._compare()

    def share(self, run: StepRun) -> list[int]:
        """Return the digests."""
        return [self._digest, self._random]

    def apply(self, run: StepRun, shared: Sequence[int]) -> None:
        """Compare the digests of the last stage with this stage's.

        Raises:
            ShardingError: If the digests differ.
        """
        if self._context.pp.rank == 0:
            return
        options, state = shared
        if options != self._digest and not self._groups_of_stage:
            self.judge.refuse(_other_options("the pipeline stages of a replica", self._options))
        if state != self._random:
            self.judge.refuse(_other_random_state(self._context.pp.ranks))

    def _compare(self) -> None:
        context, digest = self._context, self._digest
        if self._num_batches == 1 and self._differs(digest, context.pp):
            options_of_ranks = context.pp.all_gather_object(self._options)
            with self.judge.judging():
                _refuse_values_of_stages(options_of_ranks, context.pp.ranks)
            self._groups_of_stage = True
        everywhere = [context.axis("tp-dp-cp")]
        for group in everywhere if self._groups_of_stage else [*everywhere, context.pp]:
            if self._differs(digest, group):
                options_of_ranks = group.all_gather_object(self._options)
                where = f"ranks {list(group.ranks)}"
                self.judge.refuse(_other_options(where, *options_of_ranks))
        for group in (context.axis("tp-pp"), context.cp):
            if self._differs(self._random, group):
                self.judge.refuse(_other_random_state(group.ranks))

    def _differs(self, digest: int, group: AxisGroup) -> bool:
        marks = torch.tensor([digest], dtype=torch.int64, device=self._context.device)
        return bool(diverged(marks, group))


def _options_of(optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, float]]:
    """Yield the numbers in the groups of optimizers by their places."""
    for index, optimizer in enumerate(optimizers):
        prefix = f"optimizer {index}, " if len(optimizers) > 1 else ""
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                for part, item in enumerate(value if isinstance(value, tuple) else (value,)):
                    place = f"{prefix}group {number}, {key}"
                    if isinstance(item, int | float):
                        yield f"{place}[{part}]" if isinstance(value, tuple) else place, float(item)
                    elif isinstance(item, Tensor) and item.device.type == "cpu":
                        yield place, float(item) if item.numel() == 1 else 0.0


def _refuse_values_of_stages(found: Sequence[dict[str, float]], ranks: Sequence[int]) -> None:
    """Refuse an option with an equal value in all groups of each stage, but different values on
    different stages.

    Stages have different groups by design if the number of groups differs, or if an option differs
    between the groups of a stage, as in rates that fall with the depth.

    Raises:
        ShardingError: Names the option and the values.
    """
    if any(options.keys() != found[0].keys() for options in found):
        return
    for option in {re.sub(r"group \d+, ", "", place): None for place in found[0]}:
        values = [
            {v for place, v in options.items() if re.sub(r"group \d+, ", "", place) == option}
            for options in found
        ]
        # One value on each stage, and several in all: read from something that differs between
        # stages.
        if all(len(some) == 1 for some in values) and len(set.union(*values)) > 1:
            numbers = ", ".join(f"{some.pop():.9g}" for some in values)
            raise ShardingError(
                f"the pipeline stages on ranks {list(ranks)} set {option} of their optimizer "
                f"groups to {numbers}: configure_optimizers runs on every stage, and has read "
                "something that differs between stages. Compute options from values that are equal "
                "on all ranks, from the configuration, say, or a count that is made before the "
                "Trainer runs."
            )


def _digest(options: dict[str, float]) -> int:
    # Nine digits: hosts of other kinds may round otherwise.
    return zlib.crc32("".join(f"{value:.9g} " for value in options.values()).encode())


def _random_digest(devices: Sequence[torch.device]) -> int:
    """Return a digest of the states of torch's, Python's and NumPy's default generators."""
    digest = 0
    for device in devices:
        digest = zlib.crc32(get_generator_state(device).numpy().tobytes(), digest)
    of_numpy: Any = np.random.get_state(legacy=False)
    digest = zlib.crc32(of_numpy["state"]["key"].tobytes(), digest)
    version, words, gauss = random.getstate()
    # The hash of a tuple of integers is the same in all processes, and quicker than their text.
    gaussian = of_numpy["state"]["pos"], of_numpy["has_gauss"], of_numpy["gauss"]
    own_state = hash(words), version, gauss, *gaussian
    return zlib.crc32(repr(own_state).encode(), digest)


def _other_options(where: str, *found: dict[str, float]) -> ShardingError:
    first, values = found[0], ""
    for key in first:
        values_seen = list(dict.fromkeys(options.get(key) for options in found))
        if len(values_seen) > 1:
            values = f" ({key}: {', '.join(map(str, values_seen))})"
            break
    else:
        key = next((key for key in first if key.endswith("lr")), "")
        values = f" ({key}: {first[key]} on this stage)" if key else ""
    return ShardingError(
        f"options of optimizer groups differ between {where}{values}: a scheduler with a monitor, "
        "or a hook that sets them, sees other values on other ranks. Log what is monitored with "
        "sync_dist=True, or compute it from values that are equal on all ranks."
    )


def _other_random_state(ranks: Sequence[int]) -> ShardingError:
    return ShardingError(
        f"ranks {list(ranks)} belong to one model replica, and the states of their random "
        "generators (torch's, NumPy's or Python's default ones) differ at the beginning of a step: "
        "a hook or callback has drawn random numbers on some of them: on rank 0 alone, or for the "
        "parameters that a rank has, of which each pipeline stage has others. Random masks in the "
        "step would differ. Initialize weights in __init__ or configure_model, and draw on all "
        "ranks alike, or from a generator of your own (torch.Generator, numpy.random.default_rng, "
        "random.Random)."
    )
