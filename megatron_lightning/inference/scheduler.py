"""Which tokens are computed in which step: continuous batching.

A step mixes requests that are at their prompts with requests that get one new token. Prompts above
the budget of a step are computed in chunks. Requests start in the order in which they came. Where
pages run out, the youngest request gives its pages back and starts again later, with the tokens
that it has.

Every rank of a replica runs the same scheduler on the same requests and results, so that none has
to tell another what comes next. Under a pipeline there are several *groups* of requests: while one
group is on a stage, another one is on the next stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.cache import Allocator, Copies
from megatron_lightning.inference.sampling import Sampling

Ends = Callable[[Sequence[int]], bool]
"""Whether a text ends after these new tokens, which contain a stop string."""


@dataclass(eq=False)
class Request:
    """One text on its way.

    The tokens that a model may see are limited: behind ``longest`` tokens the text is continued
    from its last ``longest`` ones, which are computed anew each time.
    """

    tokens: list[int]
    """Prompt and new tokens."""
    sampling: Sampling
    generator: torch.Generator
    """Draws of this request alone, so that its text depends neither on other requests nor on the
    layout."""
    longest: int
    """Most tokens that the model sees."""
    stops: frozenset[int] = frozenset()
    """Tokens that end the text, and are not part of it."""
    ends: Ends | None = None
    """Whether a stop string has come; None: there are no stop strings."""
    num_scored: int = 0
    """Number of last tokens whose log-probabilities are wanted; 0: new tokens are wanted."""
    leader: Request | None = None
    """Request with the same prompt, whose keys are taken over; None: there is none."""
    done: int = 0
    """Tokens whose keys are kept."""
    offset: int = 0
    """Tokens before the window that the model sees."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each new token, or of each scored one."""
    best: list[tuple[int, float]] = field(default_factory=list)
    """The most likely token at the same places, and its log-probability."""
    reason: str | None = None
    """Why the text has ended: stop, length or abort; None: it has not."""

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)
        self._slide()

    @property
    def new_tokens(self) -> list[int]:
        """Tokens behind the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def num_inputs(self) -> int:
        """Tokens in the window that the model sees; the last scored token is no input."""
        return len(self.tokens) - self.offset - (self.num_scored > 0)

    @property
    def at_most(self) -> int:
        """Slots that the text may need."""
        if self.num_scored:
            return self.num_inputs
        return min(self.prompt_length + self.sampling.max_new_tokens - 1, self.longest)

    @property
    def is_behind(self) -> bool:
        """Whether more than one token has to be computed."""
        return self.num_inputs - self.done > 1

    def kept(self, first: int, end: int) -> range:
        """Return the places in the window, of inputs ``first`` to ``end`` - 1, whose logits are
        wanted.
        """
        total = self.num_inputs
        wanted = max(first, total - max(self.num_scored, 1))
        return range(wanted, end)

    def take(self, results: Sequence[tuple[float, float, float]]) -> None:
        """Take the results of a step.

        Args:
            results: For each place of :meth:`kept`: the token that was drawn, or the best one;
                the log-probability of the drawn or scored one; of the best one.
        """
        for token, logprob, best_logprob in results:
            self.logprobs.append(logprob)
            if self.num_scored:
                self.best.append((int(token), best_logprob))
                if len(self.logprobs) == self.num_scored:
                    self.reason = "length"
            else:
                self._append(int(token), best_logprob)

    def _append(self, token: int, best_logprob: float) -> None:
        if token in self.stops:
            self.logprobs.pop()
            self.reason = "stop"
            return
        self.best.append((token, best_logprob))
        self.tokens.append(token)
        if self.ends is not None and self.ends(self.tokens[self.prompt_length :]):
            self.reason = "stop"
        elif len(self.tokens) - self.prompt_length == self.sampling.max_new_tokens:
            self.reason = "length"
        self._slide()

    def _slide(self) -> None:
        """Move the window behind a text that is longer than the model's inputs."""
        surplus = len(self.tokens) - self.offset - (self.num_scored > 0) - self.longest
        if surplus > 0:
            self.offset += surplus
            self.done = 0


@dataclass(frozen=True, eq=False)
class Portion:
    """The tokens of one request in a step."""

    request: Request
    first: int
    """Place of the first one in the request's window."""
    end: int

    @property
    def kept(self) -> range:
        """Places whose logits are wanted."""
        return self.request.kept(self.first, self.end)

    @property
    def count(self) -> int:
        """Number of tokens."""
        return self.end - self.first


@dataclass(frozen=True, eq=False)
class Batch:
    """The tokens of a step; none in a step for the sake of other ranks."""

    portions: tuple[Portion, ...] = ()
    copies: Copies = ()
    """Slots to copy first."""

    @property
    def num_kept(self) -> int:
        """Number of places whose logits are wanted."""
        return sum(len(portion.kept) for portion in self.portions)


class Scheduler:
    """Waiting and running requests, and the slots that they have.

    Args:
        allocator: The slots.
        max_tokens: Tokens of one step.
        max_requests: Requests that run at once.
    """

    def __init__(self, allocator: Allocator, *, max_tokens: int, max_requests: int) -> None:
        self.allocator = allocator
        self._max_tokens = max_tokens
        self._max_requests = max_requests
        self._waiting: deque[Request] = deque()
        self._running: list[list[Request]] = [[]]

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._waiting) + sum(map(len, self._running))

    @property
    def most_steps(self) -> int:
        """An upper bound of the steps until all running and waiting requests have ended."""
        running = [request for group in self._running for request in group]
        return sum(
            1 + r.num_inputs // self._max_tokens + r.sampling.max_new_tokens
            for r in (*running, *self._waiting)
        )

    def set_groups(self, num_groups: int) -> None:
        """Divide the requests into groups, between steps: those that run stay where they are."""
        while len(self._running) < num_groups:
            self._running.append([])
        while len(self._running) > num_groups:
            self._running[0] += self._running.pop()

    def add(self, request: Request) -> None:
        """Add a request behind those that wait.

        Raises:
            ConfigError: If it can never fit.
        """
        if request.at_most > self.allocator.capacity:
            raise ConfigError(
                f"a prompt of {request.prompt_length} tokens with up to "
                f"{request.sampling.max_new_tokens} new ones needs {request.at_most} slots of the "
                f"key cache, which has {self.allocator.capacity}. Raise cache_gib, shorten the "
                "prompt, or lower max_new_tokens."
            )
        self._waiting.append(request)

    def abort(self, request: Request) -> None:
        """Give a request up, between steps."""
        request.reason = "abort"
        self.allocator.release(request)
        for queue in (self._waiting, *self._running):
            if request in queue:
                queue.remove(request)

    def plan(self, group: int) -> Batch:
        """Choose the tokens of the group's next step: of those that get one token, of those behind,
        and of new requests, as far as slots and budget reach.
        """
        running, budget = self._running[group], self._max_tokens
        portions: list[Portion] = []
        for request in sorted(running, key=lambda r: r.is_behind):  # stable
            end = min(request.num_inputs, request.done + budget)
            if request not in running or end == request.done:
                continue  # it has given way to an older one, or waits for the next step
            if not self._reserve(request, end, running, portions):
                continue
            portions.append(Portion(request, request.done, end))
            budget -= end - request.done
        copies = self._admit(group, budget, portions)
        return Batch(tuple(portions), copies)

    def _reserve(
        self, request: Request, length: int, running: list[Request], portions: list[Portion]
    ) -> bool:
        """Reserve slots for ``length`` tokens of a running request; the youngest ones of its group,
        at last the request itself, give way.
        """
        planned = {portion.request for portion in portions}
        while not self.allocator.reserve(request, length, request.at_most):
            youngest = next((r for r in reversed(running) if r not in planned), request)
            running.remove(youngest)
            self._pause(youngest)
            if youngest is request:
                return False
        return True

    def _pause(self, request: Request) -> None:
        self.allocator.release(request)
        request.done = 0
        self._waiting.appendleft(request)

    def _admit(self, group: int, budget: int, portions: list[Portion]) -> Copies:
        """Start waiting requests."""
        running = self._running[group]
        copies: Copies = ()
        share = -(-self.num_requests // len(self._running))
        most = min(share, -(-self._max_requests // len(self._running)))
        while self._waiting and len(running) < most and budget > 0:
            request = self._waiting[0]
            leader = request.leader
            prompt = min(request.prompt_length, request.longest)
            shares = leader is not None and leader.offset == request.offset == 0
            shares = shares and leader is not None and leader.reason is None
            if shares and leader is not None and leader.done < prompt - 1:
                if leader not in self._waiting:
                    break  # until its prompt is computed
                shares = False  # it has given way
            if not self.allocator.reserve(request, request.num_inputs, request.at_most):
                break
            running.append(self._waiting.popleft())
            if shares and leader is not None:
                request.done, own = self.allocator.share(leader, request, prompt - 1)
                copies += own
            end = min(request.num_inputs, request.done + budget)
            portions.append(Portion(request, request.done, end))
            budget -= end - request.done
        return copies

    def finish(self, batch: Batch, results: Sequence[tuple[float, float, float]]) -> None:
        """Take the results of a step, one for each place that was wanted, in order."""
        first = 0
        for portion in batch.portions:
            request, num_kept = portion.request, len(portion.kept)
            request.done = portion.end
            request.take(results[first : first + num_kept])
            first += num_kept
            if request.reason is not None:
                self.allocator.release(request)
                next(group for group in self._running if request in group).remove(request)
