"""Requests, and the tokens of requests in a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_lightning.inference.engine.keys.key_slots import NOTHING, Copies
from megatron_lightning.inference.engine.uncached_loop import Sampling

NOT_FINITE = "not finite"
"""Reason for the end of a text whose logits were not finite."""
Ends = Callable[[Sequence[int]], bool]
"""Whether a text ends after these tokens of prompt and text, because of a stop string."""


@dataclass
class DraftCounts:
    """Number of drafts computed by the model, and of drafts equal to the model's choice."""

    proposed: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        """Accepted share of the drafts. 0 without drafts."""
        return self.accepted / max(self.proposed, 1)

    def add(self, proposed: int, accepted: int) -> None:
        """Count the drafts of a request in a step."""
        self.proposed += proposed
        self.accepted += accepted

    def __str__(self) -> str:
        return f"{self.acceptance:.1%} of {self.proposed:,} drafts accepted"


@dataclass(eq=False)
class Request:
    """A text in progress.

    The model's input is limited: behind ``longest`` tokens the text is continued from the last
    ``longest`` tokens, computed anew each time. A text that grows behind ``longest_short`` tokens
    is computed anew once.
    """

    tokens: list[int]
    """Prompt and new tokens."""
    sampling: Sampling
    generator: torch.Generator
    """Generator of this request alone, so that the text depends neither on other requests nor on
    the layout."""
    longest: int
    """Most input tokens of the model."""
    longest_short: int | None = None
    """Most input tokens before keys of all tokens are others (LongRoPE). None: there is no such
    number."""
    stops: frozenset[int] = frozenset()
    """End tokens of the text. The text does not include an end token."""
    ends: Ends | None = None
    """Whether a stop string has appeared. None: there are no stop strings."""
    num_scored: int = 0
    """Number of last tokens to score. 0: new tokens are wanted."""
    leader: Request | None = None
    """Request with the same first tokens and reusable keys. None: there is none."""
    num_common: int = 0
    """Number of first tokens equal to the leader's, or to the followers' of a leader."""
    successor: Request | None = None
    """Request that computed the common tokens of this leader again, last. None: there is none."""
    done: int = 0
    """Number of tokens with keys in the cache."""
    has_started: bool = False
    """Whether the request has run, even if it gave way."""
    offset: int = 0
    """Tokens before the model's input window."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each new token, or of each scored token."""
    best: list[tuple[int, float]] = field(default_factory=list)
    """The most likely token at the same places, and the token's log-probability."""
    routes: torch.Tensor | None = None
    """Recorded experts of the tokens [tokens, m, k]. None: routes are not recorded."""
    drafts: Sequence[int] = ()
    """Tokens proposed behind the text. The next step verifies them."""
    end: tuple[int, float] | None = None
    """The end token chosen behind the text, and its log-probability. None: there is none."""
    steps: list[int | None] = field(default_factory=list)
    """Step of the weights that chose each new token, the end token included. Empty: not
    recorded."""
    entries: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Entries of the prompt's images for the model."""
    reason: str | None = None
    """Reason for the end of the text: stop, length, abort or :data:`NOT_FINITE`. None: the text
    has not ended."""

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)
        self._slide()

    @property
    def new_tokens(self) -> list[int]:
        """Tokens behind the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def num_inputs(self) -> int:
        """Tokens in the model's input window. The last scored token is no input."""
        return len(self.tokens) - self.offset - (self.num_scored > 0)

    @property
    def at_most(self) -> int:
        """Largest number of slots for the text."""
        if self.num_scored:
            return self.num_inputs
        return min(self.prompt_length + self.sampling.max_new_tokens - 1, self.longest)

    @property
    def most_drafts(self) -> int:
        """Number of drafts for a step: with a further token the text has at most its length. 0
        for a scored text, whose tokens are known.
        """
        if self.num_scored:
            return 0
        num_missing = self.prompt_length + self.sampling.max_new_tokens - len(self.tokens)
        longest = self.longest
        if self.longest_short is not None and not self.is_long:
            longest = self.longest_short  # tokens before refused drafts would have other keys
        return max(0, min(len(self.drafts), num_missing - 1, longest - self.num_inputs))

    @property
    def is_long(self) -> bool:
        """Whether the text is longer than ``longest_short``."""
        return self.longest_short is not None and self.num_inputs > self.longest_short

    @property
    def is_behind(self) -> bool:
        """Whether more than a single token has to be computed."""
        return self.num_inputs - self.done > 1

    @property
    def source(self) -> Request | None:
        """Request that computed the common tokens last: the leader, or the leader's successor."""
        return None if self.leader is None else self.leader.successor or self.leader

    def succeed(self) -> None:
        """Compute the common tokens in place of the leader, for further followers."""
        if self.leader is not None:
            self.leader.successor = self

    def kept(self, first: int, end: int) -> range:
        """Return the places in the window with wanted logits, of inputs ``first`` to
        ``end`` - 1.
        """
        total = self.num_inputs
        first_kept = max(first, total - max(self.num_scored, 1))
        return range(first_kept, end)

    def take(self, results: Sequence[tuple[float, float, float]]) -> None:
        """Take the results of a step.

        Args:
            results: For each place of :meth:`kept`: the drawn or the best token, the
                log-probability of the drawn or scored token, and the log-probability of the best
                token.
        """
        for token, logprob, best_logprob in results:
            if self.reason is not None:
                return  # an end before the last accepted draft
            if math.isnan(logprob) or math.isnan(best_logprob):
                self.reason = NOT_FINITE
                return
            self.logprobs.append(logprob)
            if self.num_scored:
                self.best.append((int(token), best_logprob))
                if len(self.logprobs) == self.num_scored:
                    self.reason = "length"
            else:
                self._append(int(token), best_logprob)

    def note_step(self, step: int | None) -> None:
        """Record the step of the weights behind the tokens since the last call."""
        count = len(self.logprobs) + (self.end is not None)
        self.steps += [step] * (count - len(self.steps))

    def _append(self, token: int, best_logprob: float) -> None:
        if token in self.stops:
            self.end = (token, self.logprobs.pop())
            self.reason = "stop"
            return
        was_long = self.is_long
        self.best.append((token, best_logprob))
        self.tokens.append(token)
        if self.is_long != was_long:
            self.done = 0  # the keys of all tokens are others now
        if self.ends is not None and self.ends(self.tokens):
            self.reason = "stop"
        elif len(self.tokens) - self.prompt_length == self.sampling.max_new_tokens:
            self.reason = "length"
        self._slide()

    def _slide(self) -> None:
        """Move the window behind a text longer than the model's input."""
        surplus = len(self.tokens) - self.offset - (self.num_scored > 0) - self.longest
        if surplus > 0:
            self.offset += surplus
            self.done = 0


@dataclass(frozen=True, eq=False)
class Portion:
    """The tokens of a request in a step."""

    request: Request
    first: int
    """Place of the first token in the request's window."""
    end: int
    """Place behind the last token, drafts included."""
    drafts: tuple[int, ...] = ()
    """Proposed tokens at the last places."""

    def takes(self, place: int, token: int) -> bool:
        """Return whether ``token`` is the draft at ``place``. True without a draft at the place."""
        index = place - (self.end - len(self.drafts))
        return not 0 <= index < len(self.drafts) or self.drafts[index] == token

    @property
    def kept(self) -> range:
        """Places with wanted logits."""
        return self.request.kept(self.first, self.end)

    @property
    def count(self) -> int:
        """Number of tokens."""
        return self.end - self.first


@dataclass(frozen=True, eq=False)
class Batch:
    """The tokens of a step. Empty in a step for the sake of other ranks."""

    portions: tuple[Portion, ...] = ()
    copies: Copies = NOTHING
    """Slots and states to copy first."""

    @property
    def num_kept(self) -> int:
        """Number of places with wanted logits."""
        return sum(len(portion.kept) for portion in self.portions)
