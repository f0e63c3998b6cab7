"""The reduction of one bucket over its data-parallel ranks, in flight.

    not sharded                 all-reduce
    sharded                     reduce-scatter
    sharded, with replicas      reduce-scatter inside the group of neighbours, then all-reduce of the shard over the replicas

The second phase begins when the next bucket's reduction does, so that it overlaps the backward pass as well; which collective
follows which is the same on every rank.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.optim.buckets import Bucket
from megatron_lightning.parallel.cpu_exchange import Messages, reduce_parts


class Reduction:
    """Starts the reduction of ``bucket``, which must not change until :meth:`finish` has returned.

    Args:
        bucket: The gradients to reduce, in place.
        dtype: What real gradients are sent as; None: as they are.
        bytes_communicated: Counts the size of the buffers given to each collective.
    """

    def __init__(self, bucket: Bucket, dtype: torch.dtype | None, bytes_communicated: Counter[str]) -> None:
        self._bucket, self._bytes = bucket, bytes_communicated
        self._own = bucket.gradient[bucket.shard]
        self._sent, self._spread = self._own, False
        self._work: Messages | dist.Work | None = None
        group = bucket.data.shard if bucket.sharded else bucket.data.all
        if group.process_group is None:
            return
        rounded = dtype is not None and bucket.gradient.is_floating_point()  # a complex one would lose half of itself
        buffer = bucket.gradient.to(dtype) if rounded else bucket.gradient
        self._sent = buffer[bucket.shard]
        if bucket.sharded:
            self._count("reduce_scatter", buffer)
            self._work = reduce_parts(buffer, group.process_group)
        else:
            self._count("all_reduce", buffer)
            self._work = dist.all_reduce(buffer, group=group.process_group, async_op=True)

    def spread(self) -> None:
        """Begin the second phase, if there is one and it has not begun."""
        group = self._bucket.data.replicas
        if self._spread or not self._bucket.sharded or group.process_group is None:
            return
        self._wait()
        self._count("all_reduce", self._sent)
        self._work, self._spread = dist.all_reduce(self._sent, group=group.process_group, async_op=True), True

    def finish(self) -> None:
        """Wait until this rank's part of the bucket is the sum over all ranks."""
        self.spread()
        self._wait()
        if self._sent.dtype != self._own.dtype:
            self._own.copy_(self._sent)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _count(self, collective: str, buffer: Tensor) -> None:
        self._bytes[collective] += buffer.nbytes
