"""Contiguous gradient buffers of many parameters each, and this rank's shards of the buffers.

A bucket is a 1-D gradient buffer (fp32 for half-precision parameters) with views for many
parameters, reduced by a single collective. The parameters of a bucket share all properties of the
reduction: dtype, device, the axes of replication and the axes of partial sums.

Layout, in elements (Megatron-Core's distributed optimizer; ZeRO, https://arxiv.org/abs/1910.02054,
stage 1):

    | parameter 0 | pad to 64 | parameter 1 | pad to 64 | … | pad to lcm(ranks, 128) |
    |   rank 0's shard    |   rank 1's shard   |  …  |   last rank's shard           |

Shards ignore the edges of parameters: a rank owns at most a single flat range of each, as
:class:`ParameterShard`. Optimizers of full tensors get them from the shards of several ranks
(``owners``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.compat import set_grad_dtype
from megatron_lightning.optim.gradients.data_groups import DataGroups
from megatron_lightning.optim.gradients.parameter_shard import ParameterShard, main_dtype
from megatron_lightning.optim.gradients.parameter_storage import (
    BucketLayout,
    ParameterStorage,
    PlainStorage,
    StoredBucket,
)
from megatron_lightning.parallel.cpu_exchange import Messages
from megatron_lightning.parallel.grid.context import AxisGroup

PARAMETER_ALIGNMENT = 64  # elements; keeps every view on a 128-byte boundary in 2-byte dtypes
BUCKET_ALIGNMENT = 128


@dataclass(eq=False)
class Bucket:
    """Parameters with gradients in a common buffer, reduced together."""

    names: list[str]
    parameters: list[nn.Parameter]
    sum_groups: tuple[AxisGroup, ...]
    """Groups of the gradients' partial sums, reduced before the data-parallel reduction."""
    data: DataGroups
    """Ranks of the reduction and of the shards."""
    storage: ParameterStorage = field(default_factory=PlainStorage)
    """Storage of the parameters, if sharded."""
    gradient: Tensor = field(init=False)
    """1-D buffer of all gradients."""
    stored: StoredBucket | None = field(init=False, default=None)
    """The stored parameters. Sharded buckets only."""
    views: list[Tensor] = field(init=False)
    """The gradient of each parameter, in the parameter's shape."""
    touched: list[bool] = field(init=False)
    """Whether each parameter received a gradient in this step. Views of other parameters are
    stale."""
    versions: list[int] = field(init=False, default_factory=list)
    """Version of each parameter at the last gather."""
    ready: set[int] = field(init=False, default_factory=set)
    """Parameters with the last gradient of this step received."""
    launched: bool = field(init=False, default=False)
    gathering: Messages | dist.Work | None = field(init=False, default=None)
    """The gather of the parameters in progress. Until the gather ends, other ranks' shards are
    stale."""

    def __post_init__(self) -> None:
        numels = [parameter.numel() for parameter in self.parameters]
        num_shards = self.data.shard.size if self.sharded else 1
        self.offsets, size = flat_layout(numels, num_shards)
        like = self.parameters[0]
        self.gradient = torch.zeros(size, dtype=main_dtype(like.dtype), device=like.device)
        layout = self._layout
        self.views = [layout.view(self.gradient, i) for i in range(len(self.parameters))]
        self.touched = [False] * len(self.parameters)
        for parameter in self.parameters:
            if parameter.dtype != self.gradient.dtype:
                set_grad_dtype(parameter, None)
        if self.sharded:
            self.stored = self.storage.of_bucket(layout)
        self._record_versions()

    def record_gathered(self) -> None:
        """Record the parameters as gathered."""
        if self.stored is not None:
            self.stored.record()
        self._record_versions()

    def _record_versions(self) -> None:
        self.versions = [parameter._version for parameter in self.parameters]

    def names_written(self) -> list[str]:
        """Return the parameters written in place by code outside of the step. An optimizer writes
        only shards, with separate versions.
        """
        rows = zip(self.names, self.parameters, self.versions, strict=True)
        return [name for name, parameter, version in rows if parameter._version != version]

    @property
    def value(self) -> Tensor | None:
        """1-D buffer of all parameters as ranks gather them. None: not sharded."""
        return None if self.stored is None else self.stored.value

    @property
    def _layout(self) -> BucketLayout:
        return BucketLayout(
            self.names,
            self.parameters,
            self.offsets,
            self.gradient.numel(),
            self.shard,
            self.data.shard,
        )

    @property
    def sharded(self) -> bool:
        """Whether every rank of the shard group keeps only a shard of the reduced gradients."""
        return self.data.sharded

    @property
    def shard(self) -> slice:
        """Elements of the buffers owned by this rank after the reduction."""
        return self.data.shard_of(self.gradient.numel())

    def reset(self) -> None:
        """Begin a step: the first gradient of a parameter overwrites the parameter's view."""
        self.touched = [False] * len(self.parameters)
        self.ready.clear()
        self.launched = False

    def complete(self) -> None:
        """Zero the missing gradients, to make the buffer ready for the reduction."""
        untouched = [
            view for view, touched in zip(self.views, self.touched, strict=True) if not touched
        ]
        if untouched:
            torch._foreach_zero_(untouched)

    def shards(self) -> dict[str, ParameterShard]:
        """Return this rank's shard of each parameter, by name. Parameters in other ranks' shards
        are absent.
        """
        if self.stored is None:
            return {
                name: ParameterShard.full(parameter, view)
                for name, parameter, view in zip(
                    self.names, self.parameters, self.views, strict=True
                )
            }
        layout, values, gradients = self._layout, self.stored.main, self.gradient[self.shard]
        shards = {}
        for index, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            # Shards ignore the borders of parameters: a rank may hold the end of one parameter and
            # the begin of the next.
            part, start = layout.own_range(index)
            numel = part.stop - part.start
            if not numel:
                continue
            is_full = numel == parameter.numel()
            shape = parameter.shape if is_full else (numel,)
            value, gradient = values[part].view(shape), gradients[part].view(shape)
            target = nn.Parameter(value)
            # Stays the target if main params are elsewhere, or if no optimizer steps the shard.
            if value.dtype != gradient.dtype:
                set_grad_dtype(target, None)
            shards[name] = ParameterShard(start, is_full, value, gradient, target)
        return shards


def flat_layout(numels: Sequence[int], num_shards: int) -> tuple[list[int], int]:
    """Return the offset of each parameter and the size of the buffer, for parameters in
    sequence.
    """
    offsets, size = [], 0
    for numel in numels:
        offsets.append(size)
        size += _round_up(numel, PARAMETER_ALIGNMENT)
    if num_shards > 1:
        size = _round_up(size, math.lcm(num_shards, BUCKET_ALIGNMENT))
    return offsets, size


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
