"""Several steps of several groups of requests, following one another through the stages.

Call m is a step of group m modulo the number of groups. When a call is due on a stage, the results
of the group's previous step have to be present. The last stage, on pp rank 0, sends results to the
other stages immediately. Every rank plans and finishes steps in the same order, 0, 1, 2, …, so that
all schedulers stay equal:

    plan 0 · plan 1 · finish 0 · plan 2 · finish 1 · plan 3 · …        (two groups)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.assembly.stage_runner import StageCall
from megatron_lightning.inference.engine.request_batch import Batch
from megatron_lightning.inference.engine.scheduler import Scheduler
from megatron_lightning.inference.engine.speculative import Drafter
from megatron_lightning.inference.engine.step_inputs import Steps
from megatron_lightning.inference.engine.token_choice import NUM_RESULTS, choose
from megatron_lightning.parallel.grid.context import ParallelContext


class Rounds:
    """Calls of a run of the stages.

    Args:
        scheduler: The requests.
        steps: Makes the model's calls.
        context: Groups of this rank.
        num_groups: Number of groups.
        drafter: Drafts tokens after each step. None: no drafts.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        steps: Steps,
        context: ParallelContext,
        num_groups: int,
        drafter: Drafter | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._drafter = drafter
        self._calls: dict[int, StageCall] = {}
        self._steps = steps
        self._pipeline = context.pp
        self._num_groups = num_groups
        self._batches: list[Batch] = []
        self._results: dict[int, Tensor] = {}
        self._num_finished = 0
        self._sent: list[tuple[Tensor, dist.Work]] = []

    def call(self, index: int) -> StageCall:
        """Plan the step now due, and return the model's call."""
        if index >= self._num_groups:
            self._take(index - self._num_groups)
        batch = self._scheduler.plan(index % self._num_groups)
        self._batches.append(batch)
        call = self._steps.call(batch)
        if self._drafter is not None:
            self._calls[index] = call
        return call

    def finish(self, index: int, logits: Tensor) -> None:
        """Choose tokens by the logits [1, k, v] of a step, and send the tokens to the
        other stages.
        """
        batch = self._batches[index]
        results = torch.empty(0, NUM_RESULTS, dtype=torch.float64)
        if batch.num_kept:
            results = choose(batch, logits[0])
        if self._drafter is not None:
            drafts = self._drafter.draft(batch, self._calls.pop(index), results)
            results = torch.cat((results.flatten(), drafts.flatten()))
        if not batch.num_kept:
            return
        self._results[index] = results
        for rank in self._pipeline.ranks[1:]:
            work = dist.isend(results, rank, group=self._pipeline.process_group)
            if work is not None:
                self._sent.append((results, work))

    def end(self) -> None:
        """Take the results of the last steps."""
        for index in range(self._num_finished, len(self._batches)):
            self._take(index)
        for _, work in self._sent:
            work.wait()

    def _take(self, index: int) -> None:
        """Give the results of a step to the step's requests."""
        batch = self._batches[index]
        num_drafts = 0 if self._drafter is None else self._drafter.num_tokens
        sizes = [batch.num_kept * NUM_RESULTS, len(batch.portions) * num_drafts]
        results = self._results.pop(index, None)
        if results is None:
            results = torch.empty(sum(sizes), dtype=torch.float64)
            if self._pipeline.rank != 0 and batch.num_kept:
                dist.recv(results, self._pipeline.ranks[0], group=self._pipeline.process_group)
        if not batch.num_kept:
            sizes, results = [0, 0], results[:0]
        numbers, drafts = torch.split(results.flatten(), sizes)
        self._scheduler.finish(
            batch,
            [(row[0], row[1], row[2]) for row in numbers.view(-1, NUM_RESULTS).tolist()],
            drafts.view(-1, num_drafts).long().tolist() if len(drafts) else (),
        )
        self._num_finished = index + 1
