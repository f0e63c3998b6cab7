"""Writes into parameters outside of a step, by an optimizer or by other code.

A rank's optimizer reaches the rank's shards only. Schedule-free optimizers write shards in
``train()`` and ``eval()``, hooks through ``optimizer.param_groups``: the other ranks must gather
written shards before any use of the parameters. Ordinary steps do not look for writes. Ranks
compare parameters, and agree, at times of possible writes:

    before the first batch of an evaluation, a checkpoint, an export
    before the first training batch after one of these, and of every epoch
    before the second training batch of a fit; what is found there may happen in every step, so that
        ranks compare before every batch from then on
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.errors import ShardingError
from megatron_lightning.optim.gradients.buckets import Bucket
from megatron_lightning.optim.gradients.param_gather import ParameterGather
from megatron_lightning.optim.stepping.column_sums import column_sums
from megatron_lightning.optim.stepping.distributed import DistributedOptimizer
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext


class WrittenWeights:
    """Find parameters written outside of a step, and send the new values to all ranks.

    Args:
        views: The optimizers of this rank.
        gather: Gathers parameters.
        context: Groups of this rank.
    """

    def __init__(
        self,
        views: Sequence[DistributedOptimizer],
        gather: ParameterGather,
        context: ParallelContext,
    ) -> None:
        self._views = views
        self._gather = gather
        self._context = context
        self._due = True
        self._always = False
        self._num_batches = 0

    def expect(self) -> None:
        """Look for writes before the next batch, because hooks run now."""
        self._due = True

    @property
    def is_due(self) -> bool:
        """Whether hooks may have written weights. Equal on all ranks."""
        return self._due

    def before_evaluation(self) -> None:
        """Look before a batch of an evaluation, if a look is due. A collective."""
        if self._due:
            self._due = False
            self.share()

    def before_training(self, *, first: bool) -> None:
        """Look before a training batch, if a look is due. A collective.

        Args:
            first: Whether the batch is the first of an epoch.
        """
        self._num_batches += 1
        second = self._num_batches == 2
        if not (self._due or self._always or first or second):
            return
        between_steps = second and not self._due and not first
        self._due = False
        parts = [view.shards_were_written() for view in self._views if between_steps]
        for view in self._views:
            view.take_over()
        self._always |= self.share(found=any(parts)) and between_steps

    @torch.no_grad()
    def share(self, *, found: bool = False) -> bool:
        """Gather parameters with a written shard. Return whether any shard was written. A
        collective.

        Args:
            found: Whether writes were found before.
        """
        self._gather.wait()
        stale = [view.main_was_written() for view in self._views]
        differ = self._differ()
        is_written = found or differ or any(stale)
        if not self._agree(is_written):
            return False
        self._refuse_drift(differ)
        for view in self._views:
            view.synchronize_written()
        return True

    def _differ(self) -> bool:
        """Return whether ranks of a bucket hold different parameters, or main params invisible to
        other ranks.
        """
        by_group: dict[AxisGroup, list[Bucket]] = defaultdict(list)
        for bucket in {id(b): b for view in self._views for b in view.buckets}.values():
            by_group[bucket.data.shard].append(bucket)
        stored = [bucket.stored for some in by_group.values() for bucket in some]
        stale = [bucket.were_written() for bucket in stored if bucket is not None]
        differ = any(stale)
        for group in sorted(by_group, key=lambda group: group.name):
            sums = torch.stack(
                [_checksum(bucket.value) for bucket in by_group[group] if bucket.value is not None]
            )
            extremes = torch.cat([sums, -sums])
            if group.process_group is not None:
                dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group.process_group)
            largest, smallest = extremes.chunk(2)
            differ |= not torch.equal(largest, -smallest)
        return differ

    def _refuse_drift(self, differ: bool) -> None:
        """Refuse parameters written outside of the step with values different between ranks. A
        collective.

        Raises:
            ShardingError: On every rank, naming the parameters.
        """
        buckets = {id(b): b for view in self._views for b in view.buckets}.values()
        mine = [name for bucket in buckets for name in bucket.names_written()] if differ else []
        world = self._context.axis("world")
        names = list(dict.fromkeys(n for rank in world.all_gather_object(mine) for n in rank))
        if names:
            raise ShardingError.drifted(names, world.name, world.ranks)

    def _agree(self, mine: bool) -> bool:
        """Return whether ``mine`` is true on any rank."""
        world = self._context.axis("world")
        if world.process_group is None:
            return mine
        flag = torch.tensor(float(mine), device=self._context.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=world.process_group)
        return bool(flag)


def _checksum(flat: Tensor) -> Tensor:
    """Return a number [] shared by equal bits."""
    sums = column_sums(flat)
    # Odd: a change of one column cannot cancel. 62 bits: the negative of every sum fits.
    weights = torch.arange(len(sums), device=sums.device) * 0x9E3779B1 * 2 + 1
    return (sums * weights).sum() >> 2
