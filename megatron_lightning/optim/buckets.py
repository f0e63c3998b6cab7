"""Contiguous gradient buffers: which parameters share one, and which part of each belongs to this rank.

A bucket is one 1-D gradient buffer (fp32 for half-precision parameters) that many parameters view, so that one collective
reduces them all. Its parameters agree in everything that decides how they are reduced: dtype, device, rank grid, and the
axes over which their gradients are partial sums.

Layout, in elements (Megatron-Core's distributed optimizer; ZeRO, https://arxiv.org/abs/1910.02054, stage 1):

    | parameter 0 | pad to 64 | parameter 1 | pad to 64 | … | pad to lcm(ranks, 128) |
    |   rank 0's shard    |   rank 1's shard   |  …  |   last rank's shard           |

Shards ignore the edges of parameters: a rank owns zero or one flat range of each, its :class:`Fragment`. For optimizers that
need whole matrices the parameters are assigned whole to the ranks instead, and every shard ends with padding:

    | parameter 2 | parameter 0 | pad | parameter 1 |     pad     | …
    |        rank 0's shard           |    rank 1's shard         | …
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.compat import allow_any_grad_dtype
from megatron_lightning.parallel.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.cpu_exchange import Messages
from megatron_lightning.parallel.grid import GridName
from megatron_lightning.parallel.sharding import ShardSpec

PARAMETER_ALIGNMENT = 64  # elements; keeps every view on a 128-byte boundary in 2-byte dtypes
BUCKET_ALIGNMENT = 128
_MIN_BUCKET_SIZE = 2**18  # below, a collective costs as much for its start as for its elements
_MIN_BUCKETS = 8


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of ``dtype`` parameters are summed and their masters kept."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


@dataclass(frozen=True, eq=False)
class DataGroups:
    """The ranks that hold the same parameters and see different data, and which of them keep what."""

    all: AxisGroup
    """All of them."""
    shard: AxisGroup
    """Those among which gradients and optimizer state are sharded."""
    replicas: AxisGroup
    """Those that keep the same shard as this rank."""
    sharded: bool
    """Whether a rank keeps only its shard of the reduced gradients."""

    @classmethod
    def of(cls, context: ParallelContext, grid: GridName, *, sharded: bool, num_instances: int = 1) -> DataGroups:
        """Return the groups of one grid; all ranks call this alike."""
        group = context.data_group(grid)
        shard, replicas = context.divide(group, num_instances if sharded else 1)
        return cls(group, shard, replicas, sharded and shard.size > 1)


@dataclass(eq=False)
class Fragment:
    """The part of one parameter whose reduced gradient this rank has, and which its optimizer steps."""

    name: str
    """The parameter's global name, as this rank's model has it."""
    start: int
    """Index of the first element in the flattened local parameter."""
    whole: bool
    """Whether the fragment is all of the local parameter."""
    value: Tensor
    """View of the parameter: its own shape when the fragment is whole, else 1-D."""
    gradient: Tensor
    """View of the gradient buffer, same shape as ``value``; where there is no buffer, any tensor like its gradients."""
    target: nn.Parameter
    """What the optimizer steps: the parameter itself, a view of it, or an fp32 master copy."""
    is_master: bool = False
    """Whether ``value`` itself is the fp32 master of a parameter that is used in lower precision."""


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients lie in one buffer and are reduced together."""

    names: list[str]
    parameters: list[nn.Parameter]
    sum_groups: tuple[AxisGroup, ...]
    """Groups over which the gradients are partial sums; reduced before the data-parallel reduction."""
    data: DataGroups
    """Over whom the gradients are reduced, and who keeps what."""
    assigned_by: tuple[int, ...] | None = None
    """Weight of each parameter when each is assigned whole to one shard; None: shards ignore their edges."""
    gradient: Tensor = field(init=False)
    """1-D buffer of all gradients."""
    value: Tensor | None = field(init=False, default=None)
    """1-D buffer of all parameters, in their dtype; sharded buckets only."""
    views: list[Tensor] = field(init=False)
    """The gradient of each parameter, in its shape."""
    touched: list[bool] = field(init=False)
    """Which parameters received a gradient in this window; the views of the others hold what was there before."""
    ready: set[int] = field(init=False, default_factory=set)
    """Which parameters have received their last gradient of this window."""
    launched: bool = field(init=False, default=False)
    gathering: Messages | dist.Work | None = field(init=False, default=None)
    """The gather of the parameters that is under way; until it ends, those of other ranks' shards are old."""

    def __post_init__(self) -> None:
        numels = [parameter.numel() for parameter in self.parameters]
        num_shards = self.data.shard.size if self.sharded else 1
        if self.assigned_by is None:
            self.offsets, size = flat_layout(numels, num_shards)
        else:
            self.offsets, size = whole_layout(numels, self.assigned_by, num_shards)
        like = self.parameters[0]
        self.gradient = torch.zeros(size, dtype=main_dtype(like.dtype), device=like.device)
        self.views = [self._view(self.gradient, index) for index in range(len(self.parameters))]
        self.touched = [False] * len(self.parameters)
        for parameter in self.parameters:
            if parameter.dtype != self.gradient.dtype:
                allow_any_grad_dtype(parameter)
        if self.sharded:
            self.value = torch.zeros(size, dtype=like.dtype, device=like.device)
            for index, parameter in enumerate(self.parameters):
                parameter.data = self._view(self.value, index).copy_(parameter.data)

    def _view(self, buffer: Tensor, index: int) -> Tensor:
        parameter, offset = self.parameters[index], self.offsets[index]
        return buffer[offset : offset + parameter.numel()].view(parameter.shape)

    @property
    def sharded(self) -> bool:
        """Whether every rank of the shard group keeps only its shard of the reduced gradients."""
        return self.data.sharded

    @property
    def shard(self) -> slice:
        """Elements of the buffers that this rank owns after the reduction."""
        if not self.sharded:
            return slice(0, self.gradient.numel())
        group = self.data.shard
        size = self.gradient.numel() // group.size
        return slice(group.rank * size, (group.rank + 1) * size)

    def reset(self) -> None:
        """Begin a new window: nothing was touched. The first gradient of a parameter overwrites its view."""
        self.touched = [False] * len(self.parameters)
        self.ready.clear()
        self.launched = False

    def complete(self) -> None:
        """Make the buffer ready to be reduced: parameters without a gradient have zeros."""
        untouched = [view for view, touched in zip(self.views, self.touched, strict=True) if not touched]
        if untouched:
            torch._foreach_zero_(untouched)

    def fragments(self) -> dict[str, Fragment]:
        """Return this rank's part of each parameter, by name; parameters that lie in other ranks' shards are absent."""
        if self.value is None:
            return {
                name: Fragment(name, 0, True, parameter.detach(), view, parameter)
                for name, parameter, view in zip(self.names, self.parameters, self.views, strict=True)
            }
        fragments, shard = {}, self.shard
        for index, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            offset, numel = self.offsets[index], parameter.numel()
            low, high = max(offset, shard.start), min(offset + numel, shard.stop)
            if low >= high:
                continue
            whole = high - low == numel
            shape = parameter.shape if whole else (high - low,)
            value, gradient = (buffer[low:high].view(shape) for buffer in (self.value, self.gradient))
            target = nn.Parameter(value)
            if value.dtype != gradient.dtype:  # stays the target where masters lie elsewhere, or nothing steps it
                allow_any_grad_dtype(target)
            fragments[name] = Fragment(name, low - offset, whole, value, gradient, target)
        return fragments


def flat_layout(numels: Sequence[int], num_shards: int) -> tuple[list[int], int]:
    """Return the offset of each parameter, one after another, and the size of the buffer."""
    offsets, size = [], 0
    for numel in numels:
        offsets.append(size)
        size += _round_up(numel, PARAMETER_ALIGNMENT)
    return offsets, _round_up(size, math.lcm(num_shards, BUCKET_ALIGNMENT)) if num_shards > 1 else size


def whole_layout(numels: Sequence[int], weights: Sequence[int], num_shards: int) -> tuple[list[int], int]:
    """Return the same for parameters that each lie in one shard: the heaviest first, each to the least loaded shard."""
    loads, filled, places = [0] * num_shards, [0] * num_shards, {}
    for index in sorted(range(len(numels)), key=lambda i: -weights[i]):
        shard = loads.index(min(loads))
        places[index] = (shard, filled[shard])
        loads[shard] += weights[index]
        filled[shard] += _round_up(numels[index], PARAMETER_ALIGNMENT)
    size = _round_up(max(filled), BUCKET_ALIGNMENT)
    return [places[index][0] * size + places[index][1] for index in range(len(numels))], size * num_shards


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def build_buckets(
    parameters: Mapping[str, nn.Parameter],
    specs: Mapping[str, ShardSpec],
    context: ParallelContext,
    *,
    groups: Mapping[GridName, DataGroups],
    tied: Set[str],
    whole: Set[str] = frozenset(),
    part_of: Mapping[str, int] | None = None,
    bucket_size: int | None = None,
) -> list[Bucket]:
    """Distribute parameters over buckets, in the order in which backward completes them.

    Parameters that need no reduction and no other gradient dtype are left out: autograd keeps their gradients.

    Args:
        parameters: Name -> trainable local parameter, in registration order.
        specs: Name -> spec of each of them.
        context: The groups of this rank.
        groups: The data-parallel ranks of each grid.
        tied: Names of owners that have a copy on another pipeline rank, and of such copies.
        whole: Names of the parameters whose optimizer needs all of them on one rank.
        part_of: The part of the model (pipeline stage) that completes a parameter's gradient; a bucket that is reduced early is
            of one part.
        bucket_size: Elements at which a bucket closes; None: see :class:`DataParallelOptions`.

    Returns:
        The buckets: those that need only the data-parallel reduction first, then those that are summed over other axes.
    """
    # Both holders of a tied parameter must fill their buckets alike, so these go by the owner's name, not by their place.
    backward = list(reversed(list(parameters)))
    order = [name for name in backward if name not in tied]
    order += sorted((name for name in backward if name in tied), key=lambda name: specs[name].tied_to or name)
    # Ranks of one tensor group may hold unequal parts of a table, and must agree on the buckets that they sum or assign alike.
    share = {name: math.prod(specs[name].global_shape) // context.tp.size for name in order}
    filling: dict[_Key, list[str]] = {}
    sizes: Counter[_Key] = Counter()
    closed: list[tuple[_Key, list[str]]] = []
    for name in order:
        key = _key(parameters[name], specs[name], context, tied=name in tied, whole=name in whole)
        if part_of and not key.sum_groups:
            key = key._replace(part=part_of.get(name, -1))
        num_ranks = groups[key.grid].all.size
        if not key.sum_groups and num_ranks == 1 and main_dtype(key.dtype) == key.dtype:
            continue
        filling.setdefault(key, []).append(name)
        sizes[key] += share[name]
        if sizes[key] >= (bucket_size or _default_bucket_size(sum(share.values()), num_ranks, early=not key.sum_groups)):
            closed.append((key, filling.pop(key)))
            del sizes[key]
    closed.extend(filling.items())
    place = {name: index for index, name in enumerate(order)}
    closed.sort(key=lambda item: (tuple(group.name for group in item[0].sum_groups), place[item[1][-1]]))
    return [
        Bucket(
            names,
            [parameters[name] for name in names],
            key.sum_groups,
            groups[key.grid],
            tuple(share[name] for name in names) if key.whole else None,
        )
        for key, names in closed
    ]


def _default_bucket_size(num_elements: int, num_ranks: int, *, early: bool) -> int:
    """Return Megatron's size, or less where the reduction can start early enough for a small model to gain from it."""
    size = max(40_000_000, 1_000_000 * num_ranks)
    return min(size, max(num_elements // _MIN_BUCKETS, _MIN_BUCKET_SIZE)) if early else size


class _Key(NamedTuple):
    """What the parameters of one bucket have in common."""

    dtype: torch.dtype
    device: torch.device
    grid: GridName
    sum_groups: tuple[AxisGroup, ...]
    whole: bool
    part: int = -1


def _key(parameter: nn.Parameter, spec: ShardSpec, context: ParallelContext, *, tied: bool, whole: bool) -> _Key:
    groups = [context.axis(axis, spec.grid) for axis in spec.partial_over]
    if tied:
        groups.append(context.axis("embedding"))
    return _Key(parameter.dtype, parameter.device, spec.grid, tuple(group for group in groups if group.size > 1), whole)
