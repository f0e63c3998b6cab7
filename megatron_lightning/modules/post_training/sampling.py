"""Generations that the weights of a fit sample.

The replicas share the prompts of a generation. All ranks of a replica run the engine on the same
prompts, or its first rank asks generators. The first one calls the user's functions and
environments, and sends the others the results. Then the replicas exchange their rows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from megatron_lightning.data.rollouts.generation import Generation
from megatron_lightning.data.rollouts.prompts import Prompt
from megatron_lightning.data.rollouts.seeds import seed_of
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.losses.advantages import without_signal
from megatron_lightning.modules.post_training.episodes import SECONDS, TURNS
from megatron_lightning.modules.post_training.generators.ahead import Ahead
from megatron_lightning.modules.post_training.generators.policy_fit import PolicyFit
from megatron_lightning.modules.post_training.generators.replica_rows import (
    Group,
    Groups,
    PromptBatch,
    Replica,
    ReplicaRows,
)
from megatron_lightning.modules.post_training.own_texts import sampling_engine
from megatron_lightning.parallel.grid.context import ParallelContext


class RolloutSampler:
    """Samples the generations of a fit.

    Args:
        fit: The fit.

    Raises:
        ConfigError: If the strategy has no engine.
    """

    def __init__(self, fit: PolicyFit) -> None:
        strategy = fit.trainer.strategy
        context = getattr(strategy, "context", None)
        if not isinstance(context, ParallelContext):
            raise ConfigError(
                f"prompts are set, and a {type(strategy).__name__} has no engine to sample answers "
                "with. Set strategy to a MegatronStrategy, also for one device."
            )
        self._fit = fit
        self._data = fit.data
        self._context = context
        self._team = Replica(context)
        self._rows = ReplicaRows(fit, self._team)
        self._ahead = Ahead(fit, self._team, self._work) if fit.data.options.generators else None
        self.statistics: dict[str, float] = {}
        """Counts and times of the last generation by name, for the log."""

    def sample(self, number: int) -> Generation:
        """Return a generation, of all replicas. A collective."""
        start = time.monotonic()
        data, failures = self._data, Counter[str]()
        if self._ahead is not None:
            self._ahead.begin(number)
        pending = self._prompts(number)
        found: Groups = {}
        num_replaced = num_tokens = num_samples = 0
        for turn in range(1 + data.options.dynamic_sampling):
            groups, failed = self._round(number, turn, pending)
            failures += failed
            num_samples += sum(len(group) for group in groups.values())
            num_tokens += sum(row.num_sampled for group in groups.values() for row in group)
            found |= groups
            dull = [slot for slot, group in groups.items() if self._is_dull(group)]
            if not dull or turn == data.options.dynamic_sampling:
                break
            first = data.num_prompts + num_replaced
            further = range(first, first + len(dull))
            num_replaced += len(dull)
            pending = {s: data.prompt_of(number, p) for s, p in zip(dull, further, strict=True)}
        seconds = time.monotonic() - start
        for name, count in ((TURNS, num_samples), (SECONDS, self._context.dp.size)):
            if name in failures:  # sums over samples, or over replicas
                failures[name] /= count  # type: ignore[assignment]
        self.statistics = {
            "sampling_s": seconds,
            "sampled_tokens_per_s": num_tokens / max(seconds, 1e-9),
            "replaced_groups": float(num_replaced),
            **{name: float(count) for name, count in failures.items()},
        }
        generation = Generation([row for slot in sorted(found) for row in found[slot]])
        if self._ahead is not None:
            self.statistics |= self._ahead.statistics(number, generation)
        self._warn_of_unknown(generation)
        return generation

    def close(self, *, has_failed: bool = False) -> None:
        """End with the fit."""
        if self._ahead is not None:
            self._ahead.close(has_failed=has_failed)

    def _prompts(self, number: int) -> dict[int, Prompt]:
        """Return the first prompts of a generation by their places."""
        data = self._data
        return {slot: data.prompt_of(number, slot) for slot in range(data.num_prompts)}

    def _own(self, prompts: Mapping[int, Prompt]) -> dict[int, Prompt]:
        """Return this replica's share of prompts."""
        group = self._context.dp
        return {s: p for i, (s, p) in enumerate(prompts.items()) if i % group.size == group.rank}

    def _work(self, number: int) -> tuple[dict[int, Prompt], dict[int, int]]:
        """Return this replica's share of a generation's first prompts, and their seeds."""
        own = self._own(self._prompts(number))
        return own, {slot: self._seed(number, 0, slot) for slot in own}

    def _warn_of_unknown(self, generation: Generation) -> None:
        """Warn of weights of rewards that no row has, since environments name theirs in turns."""
        unknown = [
            name
            for name in self._data.reward_weights or ()
            if generation.reward(name).isnan().all()
        ]
        if unknown:
            rank_zero_warn(
                f"reward_weights has {', '.join(unknown)}, and no row of a generation has this "
                "reward. Nothing was trained by it. Set reward_weights to names that the "
                "environment gives."
            )

    def _is_dull(self, group: Group) -> bool:
        rewards = Generation(group).rewards(self._data.reward_weights)
        return bool(without_signal(rewards, torch.zeros(len(group), dtype=torch.long)))

    def _round(
        self, number: int, turn: int, pending: Mapping[int, Prompt]
    ) -> tuple[dict[int, Group], Counter[str]]:
        """Return the groups of some prompts, by their places, and failures of rewards."""
        own = self._own(pending)
        seeds = {slot: self._seed(number, turn, slot) for slot in own}
        ahead, team, trainer = self._ahead, self._team, self._fit.trainer
        if ahead is None:
            engine = sampling_engine(trainer.strategy, self._fit.model, self._data.end_ids)
            first, step = number * self._data.num_prompts, trainer.global_step
            rows, failures = self._rows.sample(engine, PromptBatch(step, first, own, seeds))
        elif turn == 0:
            rows, failures = team.from_first(lambda: ahead.rows(number))
        else:
            rows, failures = team.from_first(lambda: ahead.sampled(number, own, seeds))
        everywhere = self._context.dp.all_gather_object((rows, failures))
        return (
            {slot: one for part, _ in everywhere for slot, one in part.items()},
            sum((counted for _, counted in everywhere), Counter[str]()),
        )

    def _seed(self, number: int, turn: int, slot: int) -> int:
        """Return the seed of a group's first answer. Each further answer adds 1."""
        return seed_of(self._data.options.seed, number, turn, slot)
