"""Rows of a replica's own prompts: answers or conversations, with their rewards.

The engine is that of the fit, which all ranks of a replica call together, or generators, which the
first rank alone calls. The user's functions and environments run on the first rank in both cases:
code that asks a service or a clock would differ between ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from megatron_lightning.data.rollouts.generation import Rollout, Text
from megatron_lightning.data.rollouts.prompts import Prompt
from megatron_lightning.data.rollouts.rollout_data import OVERLONG
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.engine.text_model import Completion
from megatron_lightning.inference.engine.uncached_loop import Sampling
from megatron_lightning.modules.post_training.episodes import Episodes
from megatron_lightning.modules.post_training.generators.policy_fit import PolicyFit
from megatron_lightning.parallel.collectives import all_reduce
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext

T = TypeVar("T")
Group = list[Rollout]
Groups = dict[int, Group]
"""Rows of each prompt, by the prompt's place."""


class PromptBatch(NamedTuple):
    """Prompts of a replica in a generation."""

    step: int
    """Step of the weights, unless the engine says it of each token."""
    first: int
    """Number of the generation's first group."""
    prompts: Mapping[int, Prompt]
    """The prompts by their places."""
    seeds: Mapping[int, int]
    """Seed of the first answer of every place. Each further answer adds 1."""


class Engine(Protocol):
    """Continues texts. See ``TextModel``."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        num_samples: int,
        *,
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        """Continue prompts, each several times."""

    def continue_each(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]
    ) -> list[Completion]:
        """Continue prompts, each with options of its own."""


class Alone:
    """A rank that samples without others."""

    is_first = True

    def from_first(self, make: Callable[[], T]) -> T:
        """Return what ``make`` returns."""
        return make()

    def any_replica(self, wants: bool) -> bool:
        """Return ``wants``."""
        return wants


class Replica:
    """The ranks of a replica.

    Args:
        context: Groups of this rank.
    """

    def __init__(self, context: ParallelContext) -> None:
        self._context = context
        self._groups: tuple[AxisGroup, ...] = (context.tp, context.cp, context.pp)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of its replica."""
        return not any(group.rank for group in self._groups)

    def from_first(self, make: Callable[[], T]) -> T:
        """Return what ``make`` returns on the first rank of the replica, which alone calls it. Its
        errors are raised on all ranks.
        """
        result: Any = None
        if self.is_first:
            try:
                result = make(), None
            except Exception as error:
                result = None, error
        for group in self._groups:  # each from those that have it by now
            result = group.broadcast_object(result)
        value, failure = result
        if failure is not None:
            raise failure
        found: T = value
        return found

    def any_replica(self, wants: bool) -> bool:
        """Return whether a replica wants another turn. A call of the engine is a collective of all:
        those whose conversations have ended call it without texts.
        """
        flag = torch.tensor(int(wants), device=self._context.device)
        return bool(all_reduce(flag, self._context.dp, "max"))

    def total(self, count: int) -> int:
        """Return the sum of a count over the replicas."""
        return sum(self._context.dp.all_gather_object(count))


class ReplicaRows:
    """Samples the rows of prompts.

    Args:
        fit: Prompts, rewards and policy.
        team: Ranks that call this together.
    """

    def __init__(self, fit: PolicyFit, team: Alone | Replica) -> None:
        self._data = fit.data
        self._policy = fit.policy
        self._longest = fit.longest
        self._team = team

    def sample(self, engine: Engine, batch: PromptBatch) -> tuple[Groups, Counter[str]]:
        """Return the rows of prompts, and failures and counts by names of the log."""
        converse = self._answers if self._data.options.environment is None else self._conversations
        return converse(engine, batch)

    def _answers(self, engine: Engine, batch: PromptBatch) -> tuple[Groups, Counter[str]]:
        """Return groups of single answers."""
        step, first, prompts, seeds = batch
        texts = self._completions(engine, list(prompts.values()), list(seeds.values()))
        rewards, failures = self._rewards(list(prompts.values()), texts)
        rows: Groups = {}
        for (slot, prompt), answers, given in zip(prompts.items(), texts, rewards, strict=True):
            rows[slot] = [
                self._row(first + slot, [_text_of(prompt, one, step)], reward, seeds[slot] + n)
                for n, (one, reward) in enumerate(zip(answers, given, strict=True))
            ]
        return rows, failures

    def _completions(
        self, engine: Engine, prompts: Sequence[Prompt], seeds: Sequence[int]
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
        number, ids = data.options.num_generations, [prompt.ids for prompt in prompts]
        return engine.generate(ids, sampling, number, seeds=list(seeds))

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
        scores, failures = self._team.from_first(lambda: self._data.rewards.score(answers))
        count = self._data.options.num_generations
        groups = [scores[i : i + count] for i in range(0, len(scores), count)]
        return groups, Counter({f"reward_failures/{n}": c for n, c in failures.items()})

    def _conversations(self, engine: Engine, batch: PromptBatch) -> tuple[Groups, Counter[str]]:
        """Return groups of conversations."""
        step, first, prompts, seeds = batch
        count, policy, team = self._data.options.num_generations, self._policy, self._team
        samples = [(p, seeds[slot] + n) for slot, p in prompts.items() for n in range(count)]
        episodes = Episodes(
            self._data,
            samples if team.is_first else (),
            policy.max_completion_length,
            self._longest,
        )
        try:
            wanted = team.from_first(episodes.begin)
            while team.any_replica(bool(wanted)):
                samplings = [
                    Sampling(max_new_tokens=most, temperature=policy.temperature, seed=seed)
                    for _, most, seed in wanted
                ]
                texts = engine.continue_each([ids for ids, _, _ in wanted], samplings)
                wanted = team.from_first(partial(episodes.take, texts))
            team.from_first(episodes.end)
        finally:
            episodes.close()
        return team.from_first(lambda: self._rows_of(episodes, first, list(prompts), step))

    def _rows_of(
        self, episodes: Episodes, first: int, slots: Sequence[int], step: int
    ) -> tuple[Groups, Counter[str]]:
        count = self._data.options.num_generations
        rows: Groups = {slot: [] for slot in slots}
        for number, one in enumerate(episodes.all):
            slot, texts = slots[number // count], [_with_steps(text, step) for text in one.texts]
            row = self._row(first + slot, texts, one.rewards, one.seed)
            rows[slot].append(row)
        return rows, episodes.counts

    def _row(
        self, group: int, texts: Sequence[Text], rewards: Mapping[str, float | None], seed: int
    ) -> Rollout:
        buffer = self._data.options.overlong_buffer
        if buffer is not None:
            length = sum(len(text.ids) for text in texts)
            excess = length - (self._policy.max_completion_length - buffer)
            # Alone it says nothing: an answer that nobody has scored stays unscored.
            is_scored = any(value is not None for value in rewards.values())
            penalty = -min(max(excess, 0) / buffer, 1.0) if is_scored else None
            rewards = {**rewards, OVERLONG: penalty}
        last = vars(texts[-1])
        return Rollout(**last, group=group, rewards=rewards, seed=seed, earlier=texts[:-1])


def _text_of(prompt: Prompt, answer: Completion, step: int) -> Text:
    ids = answer.sampled_tokens
    return Text(
        prompt_ids=list(prompt.ids),
        ids=ids,
        mask=[1] * len(ids),
        logprobs=answer.sampled_logprobs,
        steps=answer.steps or [step] * len(ids),
    )


def _with_steps(text: Text, step: int) -> Text:
    """Return a text whose sampled ids all have a step."""
    pairs = zip(text.steps, text.mask, strict=True)
    steps = [(step if own is None else own) if is_sampled else None for own, is_sampled in pairs]
    return replace(text, steps=steps)
