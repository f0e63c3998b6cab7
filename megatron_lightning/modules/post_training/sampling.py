"""Generations that the weights of a fit sample.

The replicas share the prompts of a generation. All ranks of a replica run the engine on the same
prompts. The first one calls the user's functions and environments, and sends the others the
results: code that asks a service or a clock would differ between ranks. Then the replicas exchange
their rows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from megatron_lightning.data.rollouts.generation import Generation, Rollout
from megatron_lightning.data.rollouts.prompts import Prompt
from megatron_lightning.data.rollouts.rollout_data import OVERLONG
from megatron_lightning.data.rollouts.seeds import seed_of
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.engine.text_model import Completion
from megatron_lightning.inference.engine.uncached_loop import Sampling
from megatron_lightning.layers.losses.advantages import without_signal
from megatron_lightning.modules.post_training.episodes import SECONDS, TURNS, Episodes
from megatron_lightning.modules.post_training.own_texts import sampling_engine
from megatron_lightning.modules.post_training.policy_options import PolicyOptions
from megatron_lightning.modules.post_training.rollout_data import RolloutDataModule
from megatron_lightning.parallel.collectives import all_reduce
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext

T = TypeVar("T")
Group = list[Rollout]
Text = tuple[Sequence[int], Sequence[int], Sequence[float | None]]
"""Ids behind a prompt, whether each was sampled, and log-probabilities."""


class RolloutSampler:
    """Samples generations.

    Args:
        trainer: The fit.
        data: Prompts and rewards.
        policy: Temperature and length of the answers.
        model: The trained model, or this rank's part.
        longest: Most positions of a row.

    Raises:
        ConfigError: If the strategy has no engine.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        data: RolloutDataModule,
        policy: PolicyOptions,
        model: Any,
        longest: int,
    ) -> None:
        strategy = trainer.strategy
        context = getattr(strategy, "context", None)
        if not isinstance(context, ParallelContext):
            raise ConfigError(
                f"prompts are set, and a {type(strategy).__name__} has no engine to sample answers "
                "with. Set strategy to a MegatronStrategy, also for one device."
            )
        self._strategy: Any = strategy
        self._step = trainer.global_step
        self._context = context
        self._data = data
        self._policy = policy
        self._model = model
        self._longest = longest
        self.statistics: dict[str, float] = {}
        """Counts and times of the last generation by name, for the log."""

    def sample(self, number: int) -> Generation:
        """Return a generation, of all replicas. A collective."""
        start = time.monotonic()
        data, failures = self._data, Counter[str]()
        pending = {slot: data.prompt_of(number, slot) for slot in range(data.num_prompts)}
        found: dict[int, Group] = {}
        num_replaced = num_tokens = num_samples = 0
        for turn in range(1 + data.options.dynamic_sampling):
            groups, failed = self._round(number, turn, pending)
            failures += failed
            num_samples += sum(len(group) for group in groups.values())
            num_tokens += sum(sum(row.mask) for group in groups.values() for row in group)
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
        self._warn_of_unknown(generation)
        return generation

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
        data, group = self._data, self._context.dp
        own = {s: p for i, (s, p) in enumerate(pending.items()) if i % group.size == group.rank}
        seeds = {slot: self._seed(number, turn, slot) for slot in own}
        converse = self._answers if data.options.environment is None else self._conversations
        rows, failures = converse(number * data.num_prompts, own, seeds)
        everywhere = group.all_gather_object((rows, failures))
        return (
            {slot: one for part, _ in everywhere for slot, one in part.items()},
            sum((counted for _, counted in everywhere), Counter[str]()),
        )

    def _answers(
        self, first: int, prompts: Mapping[int, Prompt], seeds: Mapping[int, int]
    ) -> tuple[dict[int, Group], Counter[str]]:
        """Return groups of single answers by their places, and failures of rewards.

        Args:
            first: Number of the generation's first group.
            prompts: Prompts of this replica by their places.
            seeds: Seed of the first answer of every place.
        """
        texts = self._completions(list(prompts.values()), list(seeds.values()))
        rewards, failures = self._rewards(list(prompts.values()), texts)
        return {
            slot: [
                self._row(
                    first + slot,
                    prompt.ids,
                    (text.sampled_tokens, [1] * len(text.sampled_tokens), text.sampled_logprobs),
                    reward,
                    seeds[slot] + index,
                )
                for index, (text, reward) in enumerate(zip(answers, given, strict=True))
            ]
            for (slot, prompt), answers, given in zip(prompts.items(), texts, rewards, strict=True)
        }, failures

    def _conversations(
        self, first: int, prompts: Mapping[int, Prompt], seeds: Mapping[int, int]
    ) -> tuple[dict[int, Group], Counter[str]]:
        """Return groups of conversations with environments by their places, and failures. The
        arguments are those of :meth:`_answers`.
        """
        count, policy = self._data.options.num_generations, self._policy
        is_first = not any(group.rank for group in self._groups_of_replica)
        samples = [(p, seeds[slot] + n) for slot, p in prompts.items() for n in range(count)]
        episodes = Episodes(
            self._data, samples if is_first else (), policy.max_completion_length, self._longest
        )
        try:
            wanted = self._from_first(episodes.begin)
            engine = self._engine()
            while self._any_replica(bool(wanted)):
                samplings = [
                    Sampling(max_new_tokens=most, temperature=policy.temperature, seed=seed)
                    for _, most, seed in wanted
                ]
                texts = engine.continue_each([ids for ids, _, _ in wanted], samplings)
                wanted = self._from_first(partial(episodes.take, texts))
            self._from_first(episodes.end)
        finally:
            episodes.close()
        return self._from_first(lambda: self._rows_of(episodes, first, list(prompts)))

    def _any_replica(self, wants: bool) -> bool:
        """Return whether a replica wants another turn. A call of the engine is a collective of all:
        those whose conversations have ended call it without texts.
        """
        flag = torch.tensor(int(wants), device=self._context.device)
        return bool(all_reduce(flag, self._context.dp, "max"))

    def _rows_of(
        self, episodes: Episodes, first: int, slots: Sequence[int]
    ) -> tuple[dict[int, Group], Counter[str]]:
        count = self._data.options.num_generations
        rows: dict[int, Group] = {slot: [] for slot in slots}
        for number, one in enumerate(episodes.all):
            slot, text = slots[number // count], (one.ids, one.mask, one.logprobs)
            row = self._row(first + slot, one.prompt_ids, text, one.rewards, one.seed)
            rows[slot].append(row)
        return rows, episodes.counts

    def _seed(self, number: int, turn: int, slot: int) -> int:
        """Return the seed of a group's first answer. Each further answer adds 1."""
        return seed_of(self._data.options.seed, number, turn, slot)

    def _engine(self) -> Any:
        return sampling_engine(self._strategy, self._model, self._data.end_ids)

    def _completions(
        self, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> list[list[Completion]]:
        policy, data = self._policy, self._data
        for prompt in prompts:
            length = len(prompt.ids) + policy.max_completion_length
            if length - 1 > self._longest:
                raise ConfigError(
                    f"a prompt has {len(prompt.ids)} ids, and with "
                    f"max_completion_length={policy.max_completion_length} the text is longer than "
                    f"the model's {self._longest} positions. Lower max_completion_length, or leave "
                    "long prompts out."
                )
        sampling = Sampling(
            max_new_tokens=policy.max_completion_length, temperature=policy.temperature
        )
        number = data.options.num_generations
        found: list[list[Completion]] = self._engine().generate(
            [prompt.ids for prompt in prompts], sampling, number, seeds=list(seeds)
        )
        return found

    def _rewards(
        self, prompts: Sequence[Prompt], texts: Sequence[Sequence[Completion]]
    ) -> tuple[list[list[dict[str, float | None]]], Counter[str]]:
        """Return the rewards of every answer, and failures by kind."""
        tokenizer = self._data.tokenizer
        answers = [
            (
                prompt.shown,
                one.tokens if tokenizer is None else tokenizer.decode(one.tokens),
                prompt.row,
            )
            for prompt, group in zip(prompts, texts, strict=True)
            for one in group
        ]
        scores, failures = self._from_first(lambda: self._data.rewards.score(answers))
        count = self._data.options.num_generations
        groups = [scores[i : i + count] for i in range(0, len(scores), count)]
        return groups, Counter({f"reward_failures/{n}": c for n, c in failures.items()})

    @property
    def _groups_of_replica(self) -> tuple[AxisGroup, ...]:
        return self._context.tp, self._context.cp, self._context.pp

    def _from_first(self, make: Callable[[], T]) -> T:
        """Return what ``make`` returns on the first rank of the replica, which alone calls it. Its
        errors are raised on all ranks.
        """
        result: Any = None
        if not any(group.rank for group in self._groups_of_replica):
            try:
                result = make(), None
            except Exception as error:
                result = None, error
        for group in self._groups_of_replica:  # each from those that have it by now
            result = group.broadcast_object(result)
        value, failure = result
        if failure is not None:
            raise failure
        found: T = value
        return found

    def _row(
        self,
        group: int,
        prompt_ids: Sequence[int],
        text: Text,
        rewards: Mapping[str, float | None],
        seed: int,
    ) -> Rollout:
        ids, mask, logprobs = text
        buffer = self._data.options.overlong_buffer
        if buffer is not None:
            excess = len(ids) - (self._policy.max_completion_length - buffer)
            # Alone it says nothing: an answer that nobody has scored stays unscored.
            is_scored = any(value is not None for value in rewards.values())
            penalty = -min(max(excess, 0) / buffer, 1.0) if is_scored else None
            rewards = {**rewards, OVERLONG: penalty}
        return Rollout(
            group=group,
            prompt_ids=list(prompt_ids),
            ids=list(ids),
            mask=list(mask),
            logprobs=list(logprobs),
            steps=[self._step if is_sampled else None for is_sampled in mask],
            rewards=rewards,
            seed=seed,
        )
