"""Choose the tokens of each step: continuous batching.

A step mixes requests still at their prompts with requests for a new token. Prompts above the budget
of a step are computed in chunks. Requests start in the order of arrival. If pages run out, the
youngest request gives its pages back and starts again later, with the tokens so far.

Every rank of a replica runs the same scheduler on the same requests and results, so that ranks need
not communicate plans. Under a pipeline there are several *groups* of requests: while a group is on
a stage, another group is on the next stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.engine.keys.key_slots import NOTHING, Allocator, Beginning, Copies
from megatron_lightning.inference.engine.keys.prefix_cache import PrefixCache, PrefixCounts
from megatron_lightning.inference.engine.request_batch import Batch, DraftCounts, Portion, Request


class Scheduler:
    """Waiting and running requests, and the slots of the requests.

    Args:
        allocator: The slots.
        max_tokens: Tokens of a step.
        max_requests: Requests running at the same time.
        num_drafts: Drafts of a request in a step.
        counts: Counts the drafts.
        keeps_prefixes: Whether keys of ended texts are kept for requests that begin alike. False if
            layers carry states.
        prefix_counts: Counts the tokens of prompts, if keys are kept.
    """

    def __init__(
        self,
        allocator: Allocator,
        *,
        max_tokens: int,
        max_requests: int,
        num_drafts: int = 0,
        counts: DraftCounts | None = None,
        keeps_prefixes: bool = False,
        prefix_counts: PrefixCounts | None = None,
    ) -> None:
        self.allocator = allocator
        self.prefixes = PrefixCache(
            allocator, is_enabled=keeps_prefixes, num_drafts=num_drafts, counts=prefix_counts
        )
        """Keys of ended texts."""
        self._num_drafts = num_drafts
        self._counts = counts or DraftCounts()
        self._max_tokens = max_tokens
        self._max_requests = max_requests
        self._waiting: deque[Request] = deque()
        self._running: list[list[Request]] = [[]]

    @property
    def num_requests(self) -> int:
        """Number of requests before their ends."""
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
        """Divide the requests into groups, between steps. Running requests stay in their groups."""
        while len(self._running) < num_groups:
            self._running.append([])
        while len(self._running) > num_groups:
            self._running[0] += self._running.pop()

    def add(self, request: Request) -> None:
        """Add a request behind the waiting requests.

        Raises:
            ConfigError: If the request can never fit.
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

    def abort_all(self) -> None:
        """Give all requests up, between steps."""
        for queue in (self._waiting, *self._running):
            for request in tuple(queue):
                self.abort(request)

    def plan(self, group: int) -> Batch:
        """Choose the tokens of the group's next step: first of requests for a single token, then of
        requests with several missing tokens, then of new requests, as far as slots and budget
        reach.
        """
        running, budget = self._running[group], self._max_tokens
        spare = budget - len(running)  # drafts take no other request's token
        ordered = sorted(running, key=lambda r: r.is_behind)  # stable
        portions: list[Portion] = []
        copies = NOTHING
        if self.allocator.has_states:
            # First, while leaders have the states behind the common tokens.
            ready = [r for r in self._waiting if self._is_ready(r, running)]
            copies = self._admit(group, spare, portions, ready)
            budget -= sum(portion.count for portion in portions)
        for request in ordered:
            end = self._end_of(request, budget)
            if request not in running or end <= request.done:
                continue  # given way to an older request, or waiting for the next step
            if not request.done:
                # A text that slid behind its first tokens is computed again. Other requests may
                # still read the old keys, in shared pages.
                self.allocator.release(request)
            if not self._reserve(request, end, running, portions):
                continue
            most = min(spare, budget - (end - request.done))
            drafts = self._drafts_of(request, most) if end == request.num_inputs else ()
            portions.append(Portion(request, request.done, end + len(drafts), drafts))
            budget -= end + len(drafts) - request.done
            spare -= len(drafts)
        further_copies = self._admit(group, budget, portions, tuple(self._waiting))
        return Batch(tuple(portions), copies.and_(further_copies))

    def _end_of(self, request: Request, budget: int) -> int:
        """Return the place behind the last token of the request's next step, without drafts.

        Layers that predict D tokens ahead need D known tokens behind each token, unless they draft.
        A scored request computes the common tokens first, and lives on until requests with the
        same context can share the keys. States can be shared behind the last common token alone.
        """
        total = request.num_inputs
        end = min(total, request.done + budget)
        shared = self._num_shared(request)
        if request.done < shared and (request.num_scored or self.allocator.has_states):
            return min(end, shared)
        if request.num_scored or end == total:
            return end
        return min(end, total - self._num_drafts)

    def _num_shared(self, request: Request) -> int:
        """Return the number of first tokens with the same keys in a leader and its followers.

        The last common token is computed by every request, for the logits of the next token.
        """
        return max(0, request.num_common - max(1, self._num_drafts))

    def _drafts_of(self, request: Request, most: int) -> tuple[int, ...]:
        """Return the request's drafts for the next step. No request gives way to drafts."""
        drafts = tuple(request.drafts[: max(0, min(request.most_drafts, most))])
        length = request.num_inputs + len(drafts)
        return drafts if self.prefixes.reserve(request, length) else ()

    def _reserve(
        self, request: Request, length: int, running: list[Request], portions: list[Portion]
    ) -> bool:
        """Reserve slots for ``length`` tokens of a running request. The youngest requests of the
        group, at last the request itself, give way.
        """
        planned = {portion.request for portion in portions}
        while not self.prefixes.reserve(request, length):
            youngest = next((r for r in reversed(running) if r not in planned), request)
            running.remove(youngest)
            self._pause(youngest)
            if youngest is request:
                return False
        return True

    def restart(self) -> None:
        """Compute the keys of all running requests again, between steps, and forget those of ended
        texts: they are of other weights.
        """
        self.prefixes.forget()
        for group in self._running:
            while group:
                self._pause(group.pop())

    def _pause(self, request: Request) -> None:
        self.allocator.release(request)
        request.done, request.drafts = 0, ()
        if request.num_scored:  # all places are scored again
            request.logprobs.clear()
            request.best.clear()
        self._waiting.appendleft(request)

    def _admit(
        self, group: int, budget: int, portions: list[Portion], candidates: Sequence[Request]
    ) -> Copies:
        """Start waiting requests."""
        running = self._running[group]
        copies = NOTHING
        # Requests are spread evenly over the groups that pass the stages in turn.
        share = -(-self.num_requests // len(self._running))
        most = min(share, -(-self._max_requests // len(self._running)))
        for request in candidates:
            if len(running) >= most or budget <= 0:
                break
            leader = self._leader_of(request)
            if leader is not None and not self._is_ready(request, running):
                continue  # until the leader has computed the common tokens
            own_copies = self._begin(request, leader)
            if own_copies is None:
                break
            copies = copies.and_(own_copies)
            self._waiting.remove(request)
            running.append(request)
            end = self._end_of(request, budget)
            if end > request.done:
                portions.append(Portion(request, request.done, end))
                budget -= end - request.done
        return copies

    def _begin(self, request: Request, leader: Request | None) -> Copies | None:
        """Reserve slots for a waiting request, with the first keys of its leader or of a kept text.
        Return the copies of the keys. None: there are not enough slots.
        """
        if leader is not None:
            beginning: Beginning | None = Beginning(leader, self._num_shared(request))
        else:
            beginning = self.prefixes.find(request)
        has_slots = self.prefixes.reserve(request, request.num_inputs, beginning)
        if not has_slots and leader is None and beginning is not None:
            # The kept text itself is in the way.
            beginning = None
            has_slots = self.prefixes.reserve(request, request.num_inputs)
        if not has_slots:
            return None
        request.done = 0 if beginning is None else beginning.length
        if leader is None:
            request.succeed()
            self.prefixes.count(request, request.done)
        request.has_started = True
        return NOTHING if beginning is None else self.allocator.copies(request, beginning)

    def _leader_of(self, request: Request) -> Request | None:
        """Return the running request with the first keys of a waiting request. None: there is
        none.
        """
        leader, shared = request.source, self._num_shared(request)
        if leader is None or leader.reason is not None or not shared:
            return None
        if leader.offset or request.offset:
            return None  # other first tokens
        if leader.is_long != request.is_long:
            return None  # other keys of the same tokens
        if leader.done < shared and not any(leader in group for group in self._running):
            return None  # the leader has given way
        if self.allocator.has_states and leader.done > shared:
            return None  # states behind further tokens
        return leader

    def _is_ready(self, request: Request, running: Sequence[Request]) -> bool:
        """Return whether a waiting request can share the first keys of its leader now.

        Steps of other groups are on their way, and states may already be behind further tokens.
        """
        leader = self._leader_of(request)
        if leader is None or leader.done < self._num_shared(request):
            return False
        return not self.allocator.has_states or leader in running

    def finish(
        self,
        batch: Batch,
        results: Sequence[tuple[float, float, float]],
        drafts: Sequence[Sequence[int]] = (),
    ) -> None:
        """Take the results of a step.

        Args:
            batch: The step.
            results: A result for each wanted place, in order. Results of a token -1 are refused
                drafts.
            drafts: Drafts for the next step of each request. Empty: none.
        """
        first = 0
        for index, portion in enumerate(batch.portions):
            request, num_kept = portion.request, len(portion.kept)
            taken_results = [
                result for result in results[first : first + num_kept] if result[0] >= 0
            ]
            # Keys of refused drafts stay in the cache, and are written over.
            request.done = self._num_done(portion, len(taken_results))
            request.drafts = drafts[index] if drafts and taken_results else ()
            if portion.drafts:
                self._counts.add(len(portion.drafts), len(taken_results) - 1)
            request.take(taken_results)
            first += num_kept
            if request.reason is not None:
                self.prefixes.keep(request)
                next(group for group in self._running if request in group).remove(request)

    def _num_done(self, portion: Portion, num_new: int) -> int:
        """Return the number of tokens with final keys after a step with ``num_new`` new tokens.

        Keys of refused drafts do not count. Layers that predict D tokens ahead have computed keys
        of earlier tokens with drafts. If a draft was refused, those tokens do not count either,
        unless this step has computed them.
        """
        request = portion.request
        if not num_new or request.num_scored:
            return portion.end
        num_known = request.num_inputs + num_new - 1
        with_drafts = max(0, num_known - self._num_drafts)
        return with_drafts if portion.first > with_drafts else num_known
