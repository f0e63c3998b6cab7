"""Conversations of samples with environments of users, on the first rank of a replica.

All samples take their turns together: the engine continues every open conversation, then every
environment answers. Ids are only appended to (:mod:`megatron_lightning.data.rollouts.turns`).
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lightning.data.chat.conversations import Chat, text_messages
from megatron_lightning.data.chat.row_values import ASSISTANT
from megatron_lightning.data.rollouts.environments import (
    Hosted,
    Outcome,
    Turn,
    call_all,
    close_all,
)
from megatron_lightning.data.rollouts.generation import Text
from megatron_lightning.data.rollouts.prompts import Prompt
from megatron_lightning.data.rollouts.rollout_data import RolloutData
from megatron_lightning.data.rollouts.seeds import seed_of
from megatron_lightning.data.rollouts.turns import Message, Turns
from megatron_lightning.data.rows.sources import Row
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.inference.engine.text_model import Completion

_log = logging.getLogger(__name__)

TURNS, SECONDS = "turns", "environment_s"
ENVIRONMENT = "environment"
"""Name of the reward of an environment that gives a number."""
Wanted = tuple[list[int], int, int]
"""Ids, most new tokens and seed of an open conversation."""


@dataclass
class Episode:
    """The conversation of a sample."""

    prompt: Prompt
    seed: int
    hosted: Hosted
    messages: list[Message] = field(default_factory=list)
    """All messages, the answers among them."""
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    """Ids behind the prompt."""
    mask: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    steps: list[int | None] = field(default_factory=list)
    """Step of the weights behind each id. None: context, or not known."""
    earlier: list[Text] = field(default_factory=list)
    """Texts before the template has changed the messages."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    turns: Turns | None = None
    num_turns: int = 0
    answer: str = ""
    """Text of the last answer."""
    is_open: bool = True
    failure: str | None = None

    def add(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float] | None,
        steps: Sequence[int | None] | None = None,
    ) -> None:
        """Append ids. Without log-probabilities they are context."""
        self.ids += ids
        self.mask += [int(logprobs is not None)] * len(ids)
        self.logprobs += [None] * len(ids) if logprobs is None else logprobs
        self.steps += [None] * len(ids) if steps is None else steps

    @property
    def num_ids(self) -> int:
        """Ids behind the prompts of all texts."""
        return len(self.ids) + sum(len(text.ids) for text in self.earlier)

    @property
    def texts(self) -> list[Text]:
        """All texts so far."""
        last = Text(
            prompt_ids=self.prompt_ids,
            ids=self.ids,
            mask=self.mask,
            logprobs=self.logprobs,
            steps=self.steps,
        )
        return [*self.earlier, last]

    def split(self, prompt_ids: list[int]) -> None:
        """Begin another text."""
        self.earlier = self.texts
        self.prompt_ids, self.ids, self.mask = prompt_ids, [], []
        self.logprobs, self.steps = [], []

    def fail(self, kind: str) -> None:
        """End a conversation that cannot be scored."""
        self.is_open, self.failure = False, kind
        self.rewards = {}

    def take_reward(self, reward: Any) -> None:
        """Add the reward of a turn."""
        if reward is None:
            return
        named = reward if isinstance(reward, Mapping) else {ENVIRONMENT: reward}
        for name, value in named.items():
            if value is not None:
                self.rewards[str(name)] = (self.rewards.get(str(name)) or 0.0) + float(value)


class Episodes:
    """The conversations of samples with their environments.

    Args:
        data: Environment, tokenizer and template.
        prompts: Prompt and seed of every sample.
        budget: Most ids behind a prompt.
        longest: Most positions of a row.
    """

    def __init__(
        self, data: RolloutData, prompts: Sequence[tuple[Prompt, int]], budget: int, longest: int
    ) -> None:
        self._data = data
        self._budget = budget
        self._longest = longest
        self.failures: Counter[str] = Counter()
        """Failures of environments by kind."""
        self.reward_failures: Counter[str] = Counter()
        """Failures of reward functions by kind."""
        self._seconds = 0.0
        make = data.environment
        self.all = [Episode(prompt, seed, Hosted(make)) for prompt, seed in prompts]
        """All conversations."""

    def begin(self) -> list[Wanted]:
        """Reset all environments, write the prompts, and return the open conversations.

        Raises:
            DataError: If an environment leaves the messages to a row that has none.
        """
        found = self._called("reset", self.all, lambda one: _reset(one.prompt, one.seed))
        for number, episode in enumerate(self.all):
            messages, tools = found[number].value or (None, None)
            if found[number].failure is not None:
                episode.fail(str(found[number].failure))
            elif messages is not None and not (messages and _are_messages(messages)):
                self._refuse(episode, "reset_not_messages", messages)
            if episode.failure is not None:
                episode.prompt_ids = list(episode.prompt.ids) or [self._data.end_ids[0]]
                continue
            if messages is None:
                messages = episode.prompt.shown
            if not (messages and _are_messages(messages)):
                raise DataError(
                    f"the environment left its first messages to the row, whose prompt is "
                    f"{messages!r:.60}, not messages. Return messages from reset, or write "
                    "messages in the rows."
                )
            episode.messages = [dict(one) for one in messages]
            episode.turns = self._turns(episode, tools)
            episode.prompt_ids = episode.turns.begin(episode.messages)
            if len(episode.prompt_ids) + self._budget - 1 > self._longest:
                raise ConfigError(
                    f"a prompt of the environment has {len(episode.prompt_ids)} ids, and with "
                    f"max_completion_length={self._budget} the text is longer than the model's "
                    f"{self._longest} positions. Lower max_completion_length, or return shorter "
                    "messages from reset."
                )
        return self._open()

    def _refuse(self, episode: Episode, kind: str, value: Any) -> None:
        """Count an answer that is none, and log the first of each kind."""
        if kind not in self.failures:
            _log.warning(
                "An environment has returned %.200r. Its sample has no rewards, and is counted as "
                "environment_failures/%s.",
                value,
                kind,
            )
        self.failures[kind] += 1
        episode.fail(kind)

    def _turns(self, episode: Episode, tools: Any) -> Turns:
        data, row = self._data, episode.prompt.row
        options = row.get("chat_template_kwargs")
        chat = Chat(
            episode.prompt.where,
            episode.messages,
            tools or row.get("tools"),
            options=options if isinstance(options, Mapping) else {},
        )
        tokenizer, template = data.chat_parts()
        return Turns(chat, tokenizer, template, data.end_ids, data.options.history)

    def _open(self) -> list[Wanted]:
        return [
            (
                [*one.prompt_ids, *one.ids],
                self._budget - one.num_ids,
                seed_of(one.seed, one.num_turns),
            )
            for one in self.all
            if one.is_open
        ]

    def take(self, answers: Sequence[Completion]) -> list[Wanted]:
        """Give the answers of the open conversations to the environments, extend those that
        continue, and return the open ones.

        Raises:
            DataError: If the chat template changes earlier messages.
        """
        episodes = [one for one in self.all if one.is_open]
        tokenizer, _ = self._data.chat_parts()
        for episode, answer in zip(episodes, answers, strict=True):
            episode.add(answer.sampled_tokens, answer.sampled_logprobs, answer.steps)
            episode.answer = tokenizer.decode(answer.tokens)
            episode.num_turns += 1
        found = self._called("step", episodes, lambda one: _step(one.messages, one.answer))
        for number, (episode, answer) in enumerate(zip(episodes, answers, strict=True)):
            turn = _turn_of(found[number])
            if isinstance(turn, str) and found[number].failure is None:
                self._refuse(episode, turn, found[number].value)
            elif isinstance(turn, str):
                episode.fail(turn)
            else:
                episode.take_reward(turn.reward)
                self._extend(episode, turn, answer)
        return self._open()

    def _extend(self, episode: Episode, turn: Turn, answer: Completion) -> None:
        is_last = turn.done or not turn.messages or answer.end is None
        before = list(episode.messages)
        message = {"role": ASSISTANT, **(turn.answer or {"content": episode.answer})}
        episode.messages += [message, *(dict(one) for one in turn.messages)]
        if is_last or episode.num_turns == self._data.options.max_turns or episode.turns is None:
            episode.is_open = False
            return
        added = episode.turns.extend(before, message, turn.messages, answer.sampled_tokens)
        rest = self._budget - episode.num_ids - len(added or ())
        prompt = episode.turns.begin(episode.messages) if added is None else []
        if rest <= 0 or len(prompt) + rest - 1 > self._longest:
            episode.is_open = False
        elif added is None:
            episode.split(prompt)
        else:
            episode.add(added, None)

    def end(self) -> None:
        """Ask environments for rewards behind the last turn, and score the conversations."""
        scorable = [one for one in self.all if one.failure is None]
        found = self._called("end", scorable, lambda _: _end)
        for number, episode in enumerate(scorable):
            if found[number].failure is not None:
                episode.fail(str(found[number].failure))
            elif not _is_reward(found[number].value):
                self._refuse(episode, "end_not_finite", found[number].value)
            else:
                episode.take_reward(found[number].value)
        scorable = [one for one in scorable if one.failure is None]
        names = dict.fromkeys(name for one in scorable for name in one.rewards)
        weights, functions = self._data.reward_weights or (), self._data.rewards
        if scorable and not names and not functions.functions:
            _log.warning(
                "No environment has given a reward, and RolloutDataModule has no rewards, so that "
                "nothing is trained. Return a reward from step or end, or set rewards."
            )
        scores, self.reward_failures = functions.score(
            [(_before_answer(one), one.answer, one.prompt.row) for one in scorable]
        )
        for episode, given in zip(scorable, scores, strict=False):
            episode.rewards |= given
        for episode in self.all:
            # A weighed reward that no sample of this replica has is known, and not scored.
            every = dict.fromkeys([*(names or [ENVIRONMENT]), *weights, *functions.functions])
            episode.rewards = {**every, **episode.rewards}

    @property
    def counts(self) -> Counter[str]:
        """Failures, turns of all samples, and seconds in environments, by names of the log."""
        return Counter(
            {f"environment_failures/{kind}": count for kind, count in self.failures.items()}
            | {f"reward_failures/{kind}": count for kind, count in self.reward_failures.items()}
            | {TURNS: sum(one.num_turns for one in self.all), SECONDS: self._seconds}
        )

    def close(self) -> None:
        """Close all environments."""
        options = self._data.options
        close_all([one.hosted for one in self.all], options.timeout_s, self.failures)

    def _called(
        self,
        name: str,
        episodes: Sequence[Episode],
        function: Callable[[Episode], Callable[[Any], Any]],
    ) -> Mapping[int, Outcome]:
        start = time.monotonic()
        calls = {number: (one.hosted, function(one)) for number, one in enumerate(episodes)}
        found = call_all(calls, name, self._data.options.timeout_s, self.failures)
        self._seconds += time.monotonic() - start
        return found


def _reset(prompt: Prompt, seed: int) -> Callable[[Any], Any]:
    row = dict(prompt.row)
    if prompt.shown and _are_messages(prompt.shown):  # also of rows that call them otherwise
        row["prompt"] = list(prompt.shown)

    async def reset(environment: Any) -> Any:
        messages = environment.reset(row, seed)
        messages = await messages if hasattr(messages, "__await__") else messages
        return messages, getattr(environment, "tools", None)

    return reset


def _step(messages: Sequence[Message], answer: str) -> Callable[[Any], Any]:
    given = list(messages)
    return lambda environment: environment.step(given, answer)


def _end(environment: Any) -> Any:
    end = getattr(environment, "end", None)
    return end() if callable(end) else None


def _turn_of(outcome: Outcome) -> Turn | str:
    """Return the turn of a call of ``step``, or the kind of its failure."""
    if outcome.failure is not None:
        return outcome.failure
    value = outcome.value
    if value is None:
        return "step_none"
    try:
        turn = value if isinstance(value, Turn) else Turn(*value)
        messages = tuple(turn.messages or ())
        answer = [{"role": ASSISTANT, **turn.answer}] if turn.answer else []
    except (TypeError, ValueError):
        return "step_no_turn"
    if not _are_messages([*answer, *messages]):
        return "step_not_messages"
    if not _is_reward(turn.reward):
        return "step_not_finite"
    return turn._replace(messages=messages, done=bool(turn.done))


def _are_messages(value: Any) -> bool:
    """Return whether a value is messages of text, which a template can be asked about."""
    if not isinstance(value, Sequence) or not all(
        isinstance(one, Mapping) and "role" in one for one in value
    ):
        return False
    try:
        text_messages(Row("", {}), value)
    except DataError:
        return False
    return True


def _is_reward(value: Any) -> bool:
    """Return whether a value is a finite number, several by name, or None."""
    rewards = value.values() if isinstance(value, Mapping) else (value,)
    try:
        return all(one is None or math.isfinite(one) for one in rewards)
    except (TypeError, ValueError):
        return False


def _before_answer(episode: Episode) -> list[Message]:
    """Return the messages before the last answer."""
    places = [n for n, one in enumerate(episode.messages) if one.get("role") == ASSISTANT]
    return episode.messages[: places[-1]] if places else list(episode.messages)
