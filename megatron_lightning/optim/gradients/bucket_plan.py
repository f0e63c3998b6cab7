"""Distribution of parameters over buckets.

All ranks of a bucket's reduction must fill the bucket alike, even with unequal shards of a table or
copies of a tied parameter. So the plan depends on nothing known to a single rank only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from megatron_lightning.optim.gradients.buckets import Bucket
from megatron_lightning.optim.gradients.data_groups import DataGroups
from megatron_lightning.optim.gradients.parameter_shard import main_dtype
from megatron_lightning.optim.gradients.parameter_storage import ParameterStorage, PlainStorage
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.shards.spec import ShardSpec

_MIN_BUCKET_SIZE = 2**18  # below, the start of a collective costs as much as the elements
_MIN_BUCKETS = 8


class _Key(NamedTuple):
    """Properties shared by the parameters of a bucket."""

    dtype: torch.dtype
    device: torch.device
    data_axes: str
    sum_groups: tuple[AxisGroup, ...]
    is_plain: bool
    """Whether the parameters are stored as values."""
    stage: int


def build_buckets(
    parameters: Mapping[str, nn.Parameter],
    specs: Mapping[str, ShardSpec],
    context: ParallelContext,
    *,
    groups: Mapping[str, DataGroups],
    tied: Mapping[str, AxisGroup],
    stage_of: Mapping[str, int] | None = None,
    bucket_size: int | None = None,
    storage: ParameterStorage | None = None,
) -> list[Bucket]:
    """Distribute parameters over buckets, in the order of completion by backward.

    Parameters without a reduction and without another gradient dtype are left out, with plain
    autograd gradients.

    Args:
        parameters: Name -> trainable local parameter, in registration order.
        specs: Name -> spec of each parameter.
        context: The groups of this rank.
        groups: ``ShardSpec.data_axes`` -> the ranks of the group.
        tied: Name of an owner with copies on other pipeline ranks, or of such a copy -> the holding
            ranks.
        stage_of: Name -> pipeline stage completing the parameter's gradient. A bucket with an early
            reduction belongs to a single stage.
        bucket_size: Elements of a full bucket. None: see :class:`DataParallelOptions`.
        storage: Storage of the parameters in sharded buckets. None: as values.

    Returns:
        The buckets: first the buckets with only the data-parallel reduction, then the buckets with
        sums over other axes.
    """
    plain_storage, stages = PlainStorage(), stage_of or {}
    storage = storage or plain_storage
    sizes = {
        name: _equal_share(specs[name], context)
        for name in _completion_order(parameters, specs, tied)
    }
    num_elements = sum(sizes.values())
    keys: dict[str, _Key] = {}
    for name in sizes:
        parameter, spec = parameters[name], specs[name]
        sum_groups = sum_groups_of(spec, context, tied.get(name))
        num_ranks = groups[spec.data_axes].all.size
        # What differs in any field of the key cannot share one buffer and one collective.
        if sum_groups or num_ranks > 1 or main_dtype(parameter.dtype) != parameter.dtype:
            keys[name] = _Key(
                parameter.dtype,
                parameter.device,
                spec.data_axes,
                sum_groups,
                is_plain=name not in storage.names or not groups[spec.data_axes].sharded,
                # Sums over other axes wait for the end of the step, when stages no longer matter.
                stage=-1 if sum_groups else stages.get(name, -1),
            )

    def limit(key: _Key) -> int:
        num_ranks, early = groups[key.data_axes].all.size, not key.sum_groups
        return bucket_size or _default_bucket_size(num_elements, num_ranks, early=early)

    return [
        Bucket(
            names,
            [parameters[name] for name in names],
            key.sum_groups,
            groups[key.data_axes],
            plain_storage if key.is_plain else storage,
        )
        for key, names in _fill(keys, sizes, limit)
    ]


def _fill(
    keys: Mapping[str, _Key], sizes: Mapping[str, int], limit: Callable[[_Key], int]
) -> list[tuple[_Key, list[str]]]:
    """Return the buckets of parameters with equal keys, in the order of the buckets' last
    parameters. Buckets with further sums come last.

    Args:
        keys: Name -> key, in the order of completion by backward.
        sizes: Name -> elements.
        limit: Function from a key to the elements of a full bucket.
    """
    filling: dict[_Key, list[str]] = {}
    filled: Counter[_Key] = Counter()
    closed: list[tuple[_Key, list[str]]] = []
    for name, key in keys.items():
        filling.setdefault(key, []).append(name)
        filled[key] += sizes[name]
        # Several buckets fill side by side, one for each key, since kinds of parameters alternate
        # in a model.
        if filled[key] >= limit(key):
            closed.append((key, filling.pop(key)))
            del filled[key]
    closed.extend(filling.items())
    place = {name: index for index, name in enumerate(keys)}
    # A bucket is ready with its last parameter. Buckets are launched in this order on all ranks, so
    # a bucket must not wait behind a later one.
    closed.sort(
        key=lambda item: (tuple(group.name for group in item[0].sum_groups), place[item[1][-1]])
    )
    return closed


def _completion_order(
    parameters: Mapping[str, nn.Parameter],
    specs: Mapping[str, ShardSpec],
    tied: Mapping[str, AxisGroup],
) -> list[str]:
    """Return the untied names in the order of backward, and then the tied names in the order of the
    owners' names, equal on all holders.
    """
    backward = list(reversed(list(parameters)))
    last = sorted(
        (name for name in backward if name in tied), key=lambda name: specs[name].tied_to or name
    )
    return [name for name in backward if name not in tied] + last


def _equal_share(spec: ShardSpec, context: ParallelContext) -> int:
    """Return an equal share of the elements of a parameter, whatever this rank's shard."""
    num_parts = math.prod(context.axis(axis).size for axis in spec.sharded_over)
    return math.prod(spec.global_shape) // num_parts


def sum_groups_of(
    spec: ShardSpec, context: ParallelContext, holders: AxisGroup | None = None
) -> tuple[AxisGroup, ...]:
    """Return the groups of a gradient's partial sums. ``holders``: the ranks with copies of a tied
    parameter.
    """
    groups = [context.axis(axis) for axis in spec.partial_over]
    if holders is not None:
        groups.append(holders)
    return tuple(group for group in groups if group.size > 1)


def _default_bucket_size(num_elements: int, num_ranks: int, *, early: bool) -> int:
    """Return Megatron's bucket size, or less for a small model, because an early start of the
    reduction pays off.
    """
    size = max(40_000_000, 1_000_000 * num_ranks)
    return min(size, max(num_elements // _MIN_BUCKETS, _MIN_BUCKET_SIZE)) if early else size
