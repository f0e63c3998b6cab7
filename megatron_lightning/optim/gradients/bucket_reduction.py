"""The asynchronous reduction of a gradient buffer over data-parallel ranks.

    not sharded                 all-reduce
    sharded                     reduce-scatter
    sharded, with replicas      reduce-scatter inside the shard group,
                                then all-reduce of the shard over the replicas

The second phase begins together with the next bucket's reduction, and so overlaps the backward pass
as well. The order of the collectives is the same on every rank.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.optim.gradients.data_groups import DataGroups
from megatron_lightning.parallel.cpu_exchange import Messages, reduce_chunks


class Reduction:
    """Start the reduction of ``gradient``. The buffer must not change until :meth:`finish` has
    returned.

    Args:
        gradient: The gradients to reduce, 1-D, in place.
        data: Ranks of the reduction and of the shards.
        dtype: Dtype of real gradients in the collectives. None: the dtype of ``gradient``.
        bytes_communicated: Counts the bytes given to each collective.
    """

    def __init__(
        self,
        gradient: Tensor,
        data: DataGroups,
        dtype: torch.dtype | None,
        bytes_communicated: Counter[str],
    ) -> None:
        self._data = data
        self._bytes = bytes_communicated
        shard = data.shard_of(gradient.numel())
        self._own = gradient[shard]
        self._sent = self._own
        self._second_phase = False
        self._work: Messages | dist.Work | None = None
        group = data.shard if data.sharded else data.all
        if group.process_group is None:
            return
        # A complex gradient would lose the imaginary part.
        rounded = dtype is not None and gradient.is_floating_point()
        buffer = gradient.to(dtype) if rounded else gradient
        # The reduction works in place: afterwards this rank's shard of the buffer holds the sum.
        self._sent = buffer[shard]
        if data.sharded:
            self._count("reduce_scatter", buffer)
            self._work = reduce_chunks(buffer, group.process_group)
        else:
            self._count("all_reduce", buffer)
            self._work = dist.all_reduce(buffer, group=group.process_group, async_op=True)

    def reduce_replicas(self) -> None:
        """Begin the second phase, if there is a second phase not begun yet."""
        group = self._data.replicas
        if self._second_phase or not self._data.sharded or group.process_group is None:
            return
        self._wait()
        self._count("all_reduce", self._sent)
        self._work = dist.all_reduce(self._sent, group=group.process_group, async_op=True)
        self._second_phase = True

    def finish(self) -> None:
        """Wait until this rank's shard is the sum over all ranks."""
        self.reduce_replicas()
        self._wait()
        if self._sent.dtype != self._own.dtype:
            self._own.copy_(self._sent)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _count(self, collective: str, buffer: Tensor) -> None:
        self._bytes[collective] += buffer.nbytes
