"""Contiguous gradient buffers of many parameters each, and this rank's shards of them.

A bucket is one 1-D gradient buffer (fp32 for half-precision parameters) that many parameters view,
so that one collective reduces them all. Its parameters agree in everything that decides how they
are reduced: dtype, device, and the axes over which they are replicated and over which their
gradients are partial sums.

Layout, in elements (Megatron-Core's distributed optimizer; ZeRO, https://arxiv.org/abs/1910.02054,
stage 1):

    | parameter 0 | pad to 64 | parameter 1 | pad to 64 | … | pad to lcm(ranks, 128) |
    |   rank 0's shard    |   rank 1's shard   |  …  |   last rank's shard           |

Shards ignore the edges of parameters: a rank owns zero or one flat range of each, its
:class:`ParameterShard`. For optimizers that need full matrices every parameter is assigned to one
rank instead, and every shard ends with padding:

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

from megatron_lightning.compat import set_grad_dtype
from megatron_lightning.optim.codes import CodedWeight, Coder, Range
from megatron_lightning.parallel.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.cpu_exchange import Messages, gather_chunks
from megatron_lightning.parallel.spec import Box, Shard, ShardSpec

PARAMETER_ALIGNMENT = 64  # elements; keeps every view on a 128-byte boundary in 2-byte dtypes
BUCKET_ALIGNMENT = 128
_MIN_BUCKET_SIZE = 2**18  # below, a collective costs as much for its start as for its elements
_MIN_BUCKETS = 8


def has_replicas(context: ParallelContext) -> bool:
    """Return whether several ranks hold the same parameters: dense ones, or experts'."""
    return max(context.dp_cp.size, context.edp.size) > 1


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the summed gradients and main params of ``dtype`` parameters."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


@dataclass(frozen=True, eq=False)
class DataGroups:
    """The ranks that hold the same parameters and see different data, and how they shard
    gradients.
    """

    all: AxisGroup
    """All of them."""
    shard: AxisGroup
    """Those among which gradients and optimizer state are sharded."""
    replicas: AxisGroup
    """Those that keep the same shards as this rank."""
    sharded: bool
    """Whether a rank keeps only its shard of the reduced gradients."""

    def shard_of(self, numel: int) -> slice:
        """Return the elements of a gradient buffer that this rank keeps."""
        size = numel // self.shard.size
        return (
            slice(self.shard.rank * size, (self.shard.rank + 1) * size)
            if self.sharded
            else slice(0, numel)
        )

    @classmethod
    def of(
        cls, group: AxisGroup, context: ParallelContext, *, sharded: bool, num_instances: int = 1
    ) -> DataGroups:
        """Return the groups of one kind of parameters, which are replicated over ``group``; all
        ranks call this alike.
        """
        shard, replicas = context.divide(group, num_instances if sharded else 1)
        return cls(group, shard, replicas, sharded and shard.size > 1)


@dataclass(eq=False)
class ParameterShard:
    """The range of one local parameter whose reduced gradient this rank has, and which its
    optimizer steps.
    """

    start: int
    """Index of the first element in the flattened local parameter."""
    is_full: bool
    """Whether the shard is the full local parameter."""
    value: Tensor
    """View of the parameter: its own shape when the shard is full, else 1-D."""
    gradient: Tensor
    """View of the gradient buffer, same shape as ``value``; where there is no buffer, any tensor
    like its gradients."""
    target: nn.Parameter
    """Carries the gradient to the optimizer: the parameter itself, a view of it, or an fp32 main
    param."""
    is_main: bool = False
    """Whether ``value`` itself is the fp32 main param of a parameter that is used in lower
    precision."""
    box: Box | None = None
    """Range of the local parameter; None: the elements from ``start`` on."""

    def shards(self, spec: ShardSpec, tensor: Tensor) -> list[Shard]:
        """Return the shards of the global parameter of which a tensor like ``value`` consists."""
        if self.is_full:
            return spec.shards(tensor)
        if self.box is None:
            return spec.flat_shards(tensor, self.start)
        part = spec.part(self.box)
        return part.shards(tensor.view(part.local_shape))

    @classmethod
    def full(cls, parameter: nn.Parameter, gradient: Tensor | None = None) -> ParameterShard:
        """Return the shard of a parameter that is not divided."""
        value = parameter.detach()
        return cls(0, True, value, value if gradient is None else gradient, parameter)


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients lie in one buffer and are reduced together."""

    names: list[str]
    parameters: list[nn.Parameter]
    sum_groups: tuple[AxisGroup, ...]
    """Groups over which the gradients are partial sums; reduced before the data-parallel
    reduction."""
    data: DataGroups
    """Ranks over which the gradients are reduced and sharded."""
    assigned_by: tuple[int, ...] | None = None
    """Weight of each parameter when each is assigned to one shard; None: shards ignore their
    edges."""
    coders: tuple[Coder, ...] = ()
    """Make codes of the parameters, which ranks gather instead of values; none: values."""
    gradient: Tensor = field(init=False)
    """1-D buffer of all gradients."""
    value: Tensor | None = field(init=False, default=None)
    """1-D buffer of all parameters, in their dtype or as codes; sharded buckets only."""
    main: Tensor | None = field(init=False, default=None)
    """1-D buffer of this rank's shard in the parameters' dtype, where they may be kept as codes."""
    holds_codes: bool = field(init=False, default=False)
    """Whether the parameters are codes now."""
    views: list[Tensor] = field(init=False)
    """The gradient of each parameter, in its shape."""
    touched: list[bool] = field(init=False)
    """Parameters that received a gradient in this step; the views of the others are stale."""
    ready: set[int] = field(init=False, default_factory=set)
    """Parameters that have received their last gradient of this step."""
    launched: bool = field(init=False, default=False)
    gathering: Messages | dist.Work | None = field(init=False, default=None)
    """The gather of the parameters in progress; until it ends, other ranks' shards are stale."""

    def __post_init__(self) -> None:
        numels = [parameter.numel() for parameter in self.parameters]
        num_shards = self.data.shard.size if self.sharded else 1
        if self.assigned_by is None:
            self.offsets, size = flat_layout(numels, num_shards)
        else:
            self.offsets, size = assigned_layout(numels, self.assigned_by, num_shards)
        like = self.parameters[0]
        self.gradient = torch.zeros(size, dtype=main_dtype(like.dtype), device=like.device)
        self.views = [self._view(self.gradient, index) for index in range(len(self.parameters))]
        self.touched = [False] * len(self.parameters)
        for parameter in self.parameters:
            if parameter.dtype != self.gradient.dtype:
                set_grad_dtype(parameter, None)
        if self.sharded:
            self.value = torch.zeros(size, dtype=like.dtype, device=like.device)
            for index, parameter in enumerate(self.parameters):
                parameter.data = self._view(self.value, index).copy_(parameter.data)
        if self.coders and self.value is not None:
            self.main = self.value[self.shard].clone()
            self.keep_codes()

    def keep_codes(self) -> None:
        """Keep this rank's shard as main params, and of all parameters codes, which are not made
        yet; without coders do nothing.
        """
        if self.main is None or self.value is None or self.holds_codes:
            return
        self.main.copy_(self.value[self.shard])
        self.value = torch.zeros(self.value.shape, dtype=torch.uint8, device=self.value.device)
        for index, (parameter, coder) in enumerate(zip(self.parameters, self.coders, strict=True)):
            parameter.data = self._view(self.value, index).view(coder.dtype)
            set_grad_dtype(parameter, None)
        self.holds_codes = True

    def coded_weights(self) -> list[CodedWeight]:
        """Return the parameters that are kept as codes, with this rank's range of each."""
        if self.value is None or self.main is None or not self.holds_codes:
            return []
        shard, coded = self.shard, []
        for coder, parameter, offset in zip(
            self.coders, self.parameters, self.offsets, strict=True
        ):
            low, high = max(offset, shard.start), min(offset + parameter.numel(), shard.stop)
            values = self.main[low - shard.start : high - shard.start]
            own = Range(low - offset, values, self.value[low:high])
            coded.append(CodedWeight(coder, [own] if low < high else [], self.main.device))
        return coded

    def drop_codes(self, group: dist.ProcessGroup) -> None:
        """Gather the main params, so that the parameters are again what they were. A collective."""
        if self.main is None or not self.holds_codes:
            return
        values = self.main.new_zeros(self.gradient.numel())
        values[self.shard] = self.main
        gathering = gather_chunks(values, group)
        if gathering is not None:
            gathering.wait()
        self.value, self.holds_codes = values, False
        for index, parameter in enumerate(self.parameters):
            parameter.data = self._view(values, index)
            set_grad_dtype(parameter, parameter.dtype)

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
        return self.data.shard_of(self.gradient.numel())

    def reset(self) -> None:
        """Begin a step: the first gradient of a parameter overwrites its view."""
        self.touched = [False] * len(self.parameters)
        self.ready.clear()
        self.launched = False

    def complete(self) -> None:
        """Zero the gradients that were not computed, so that the buffer can be reduced."""
        untouched = [
            view for view, touched in zip(self.views, self.touched, strict=True) if not touched
        ]
        if untouched:
            torch._foreach_zero_(untouched)

    def shards(self) -> dict[str, ParameterShard]:
        """Return this rank's shard of each parameter, by name; parameters in other ranks' shards
        are absent.
        """
        if self.value is None:
            return {
                name: ParameterShard.full(parameter, view)
                for name, parameter, view in zip(
                    self.names, self.parameters, self.views, strict=True
                )
            }
        shards, shard = {}, self.shard
        for index, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            offset, numel = self.offsets[index], parameter.numel()
            low, high = max(offset, shard.start), min(offset + numel, shard.stop)
            if low >= high:
                continue
            is_full = high - low == numel
            shape = parameter.shape if is_full else (high - low,)
            gradient = self.gradient[low:high].view(shape)
            if self.main is None:
                value = self.value[low:high].view(shape)
            else:
                value = self.main[low - shard.start : high - shard.start].view(shape)
            target = nn.Parameter(value)
            # Stays the target where main params are elsewhere, or nothing steps it.
            if value.dtype != gradient.dtype:
                set_grad_dtype(target, None)
            shards[name] = ParameterShard(low - offset, is_full, value, gradient, target)
        return shards


def flat_layout(numels: Sequence[int], num_shards: int) -> tuple[list[int], int]:
    """Return the offset of each parameter, one after another, and the size of the buffer."""
    offsets, size = [], 0
    for numel in numels:
        offsets.append(size)
        size += _round_up(numel, PARAMETER_ALIGNMENT)
    return offsets, _round_up(
        size, math.lcm(num_shards, BUCKET_ALIGNMENT)
    ) if num_shards > 1 else size


def assigned_layout(
    numels: Sequence[int], weights: Sequence[int], num_shards: int
) -> tuple[list[int], int]:
    """Return the same for parameters that each lie in one shard: the heaviest first, in the least
    loaded shard.
    """
    loads, filled, places = [0] * num_shards, [0] * num_shards, {}
    for index in sorted(range(len(numels)), key=lambda i: -weights[i]):
        shard = loads.index(min(loads))
        places[index] = (shard, filled[shard])
        loads[shard] += weights[index]
        filled[shard] += _round_up(numels[index], PARAMETER_ALIGNMENT)
    size = _round_up(max(filled), BUCKET_ALIGNMENT)
    return [
        places[index][0] * size + places[index][1] for index in range(len(numels))
    ], size * num_shards


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def build_buckets(
    parameters: Mapping[str, nn.Parameter],
    specs: Mapping[str, ShardSpec],
    context: ParallelContext,
    *,
    groups: Mapping[str, DataGroups],
    tied: Mapping[str, AxisGroup],
    matrices: Set[str] = frozenset(),
    stage_of: Mapping[str, int] | None = None,
    bucket_size: int | None = None,
    coders: Mapping[str, Coder] | None = None,
) -> list[Bucket]:
    """Distribute parameters over buckets, in the order in which backward completes them.

    Parameters that need no reduction and no other gradient dtype are left out: autograd keeps their
    gradients.

    Args:
        parameters: Name -> trainable local parameter, in registration order.
        specs: Name -> spec of each of them.
        context: The groups of this rank.
        groups: ``ShardSpec.data_axes`` -> the ranks of that group.
        tied: Name of an owner that has copies on other pipeline ranks, or of such a copy -> the
            ranks that hold it.
        matrices: Names of the parameters whose optimizer needs them undivided.
        stage_of: The pipeline stage that completes a parameter's gradient; a bucket that is reduced
            early is of one stage.
        bucket_size: Elements at which a bucket closes; None: see :class:`DataParallelOptions`.
        coders: Name -> coder of a parameter that is kept as codes, where it is sharded.

    Returns:
        The buckets: those that need only the data-parallel reduction first, then those that are
        summed over other axes.
    """
    # All holders of a tied parameter must fill their buckets alike, so these are sorted by the
    # owner's name.
    backward = list(reversed(list(parameters)))
    order = [name for name in backward if name not in tied]
    order += sorted(
        (name for name in backward if name in tied), key=lambda name: specs[name].tied_to or name
    )
    # Ranks may hold unequal shards of a table, and must agree on the buckets.
    num_parts = {
        name: math.prod(context.axis(axis).size for axis in specs[name].sharded_over)
        for name in order
    }
    coders = {
        name: coder
        for name, coder in (coders or {}).items()
        if name in parameters and groups[specs[name].data_axes].sharded
    }
    share = {name: math.prod(specs[name].global_shape) // num_parts[name] for name in order}
    filling: dict[_Key, list[str]] = {}
    sizes: Counter[_Key] = Counter()
    closed: list[tuple[_Key, list[str]]] = []
    for name in order:
        key = _key(parameters[name], specs[name], context, tied.get(name), matrix=name in matrices)
        key = key._replace(coded=name in coders)
        if stage_of and not key.sum_groups:
            key = key._replace(stage=stage_of.get(name, -1))
        num_ranks = groups[key.data_axes].all.size
        if not key.sum_groups and num_ranks == 1 and main_dtype(key.dtype) == key.dtype:
            continue
        filling.setdefault(key, []).append(name)
        sizes[key] += share[name]
        if sizes[key] >= (
            bucket_size
            or _default_bucket_size(sum(share.values()), num_ranks, early=not key.sum_groups)
        ):
            closed.append((key, filling.pop(key)))
            del sizes[key]
    closed.extend(filling.items())
    place = {name: index for index, name in enumerate(order)}
    closed.sort(
        key=lambda item: (tuple(group.name for group in item[0].sum_groups), place[item[1][-1]])
    )
    return [
        Bucket(
            names,
            [parameters[name] for name in names],
            key.sum_groups,
            groups[key.data_axes],
            tuple(share[name] for name in names) if key.matrix else None,
            tuple(coders[name] for name in names) if key.coded else (),
        )
        for key, names in closed
    ]


def _default_bucket_size(num_elements: int, num_ranks: int, *, early: bool) -> int:
    """Return Megatron's size, or less where a small model gains from an early start of the
    reduction.
    """
    size = max(40_000_000, 1_000_000 * num_ranks)
    return min(size, max(num_elements // _MIN_BUCKETS, _MIN_BUCKET_SIZE)) if early else size


class _Key(NamedTuple):
    """Properties that the parameters of one bucket share."""

    dtype: torch.dtype
    device: torch.device
    data_axes: str
    sum_groups: tuple[AxisGroup, ...]
    matrix: bool
    stage: int = -1
    coded: bool = False


def _key(
    parameter: nn.Parameter,
    spec: ShardSpec,
    context: ParallelContext,
    holders: AxisGroup | None,
    *,
    matrix: bool,
) -> _Key:
    groups = [context.axis(axis) for axis in spec.partial_over]
    if holders is not None:
        groups.append(holders)
    return _Key(
        parameter.dtype,
        parameter.device,
        spec.data_axes,
        tuple(group for group in groups if group.size > 1),
        matrix,
    )
