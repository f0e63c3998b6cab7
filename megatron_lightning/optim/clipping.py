"""Gradient norm over every axis without double counting, and clipping.

A gradient counts once, as in megatron/core/optimizer/clip_grads.py: never on the holder of a tied
copy, and only on the first of several ranks with equal parameters. Norms of sharded gradients are
also summed over the data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.shards.spec import ShardSpec, is_writer

_ROW = 16384
"""Elements per partial sum of a norm on a CPU."""


Items = Iterable[tuple[Tensor, ShardSpec]]
"""Reduced gradients with the specs of their parameters."""


def global_grad_norms(
    items: Mapping[str, Items],
    context: ParallelContext,
    *,
    sharded: bool,
    norm_type: float = 2.0,
) -> dict[str, Tensor]:
    """Return the norm of the model's gradients of every key, equal on every rank. A collective.

    Args:
        items: This rank's gradients by key. All ranks pass the same keys in the same order.
        context: The groups of this rank.
        sharded: Whether data-parallel ranks hold different shards of the gradients.
        norm_type: p of the p-norm. ``math.inf`` for the largest absolute value.

    Returns:
        A scalar tensor on the context's device for each key. 0: no gradient.
    """
    if norm_type <= 0:
        raise ConfigError(
            f"norm_type is {norm_type}; a norm over several ranks needs a positive order. Set 2.0 "
            "or inf."
        )
    if not items:
        return {}
    norms = [
        _norms_over(group, gradients, context, norm_type)
        for group, gradients in _counted_once(items, context, sharded).items()
    ]
    total = norms[0]
    if len(norms) > 1:
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type, dim=0)
    return dict(zip(items, total.unbind(), strict=True))


def global_grad_norm(
    items: Items, context: ParallelContext, *, sharded: bool, norm_type: float = 2.0
) -> Tensor:
    """Return the norm of all gradients of the model. A collective. See
    :func:`global_grad_norms`.
    """
    norms = global_grad_norms({"": items}, context, sharded=sharded, norm_type=norm_type)
    return norms[""]


def global_zero_count(items: Items, context: ParallelContext, *, sharded: bool) -> Tensor:
    """Return how many elements of all gradients of the model are zero, equal on every rank. A
    collective.

    The arguments equal the arguments of :func:`global_grad_norm`. The result is an int64 scalar.
    """
    counts = []
    for group, (gradients,) in _counted_once({"": items}, context, sharded).items():
        count = torch.zeros((), dtype=torch.int64, device=context.device)
        for gradient in gradients:
            count += (gradient == 0).sum()
        if group.process_group is not None:
            dist.all_reduce(count, group=group.process_group)
        counts.append(count)
    return torch.stack(counts).sum()


def clip_grads_by_norm_(gradients: Iterable[Tensor], max_norm: float, total_norm: Tensor) -> None:
    """Scale the gradients in place to a norm of at most ``max_norm``, given the present norm
    ``total_norm``.
    """
    tensors = list(gradients)
    if tensors:
        torch._foreach_mul_(tensors, (max_norm / (total_norm + 1e-6)).clamp(max=1.0))


def clip_grads_by_value_(gradients: Iterable[Tensor], max_value: float) -> None:
    """Clamp every element of the gradients to [-max_value, max_value], in place."""
    tensors = list(gradients)
    if tensors:
        torch._foreach_clamp_min_(tensors, -max_value)
        torch._foreach_clamp_max_(tensors, max_value)


def norm_groups(context: ParallelContext, sharded: bool) -> dict[str, AxisGroup]:
    """Return ``ShardSpec.model_axes`` -> the ranks that together hold gradients once. Groups of
    equal ranks are the same object.
    """
    # The model ranks times the data-parallel ranks are all ranks, for both kinds of parameters.
    if sharded:
        return dict.fromkeys(("tp-pp", "etp-ep-pp"), context.axis("world"))
    dense, expert = context.axis("tp-pp"), context.axis("etp-ep-pp")
    return {"tp-pp": dense, "etp-ep-pp": dense if expert.ranks == dense.ranks else expert}


def _pieces(gradient: Tensor, norm_type: float) -> tuple[Tensor, ...]:
    """Return tensors with the same norm as ``gradient``.

    On a CPU torch adds up a tensor in a single fp32 sum for each vector lane. For 16 million
    elements the sum is 7e-4 too low, and the error depends on the sharding of the tensor. Norms of
    rows come first, at no cost.
    """
    num_rows = gradient.numel() // _ROW
    if gradient.device.type != "cpu" or gradient.dtype != torch.float32 or num_rows < 2:
        return (gradient,)
    flat = gradient.reshape(-1)
    rows, remainder = flat[: num_rows * _ROW].view(num_rows, _ROW), flat[num_rows * _ROW :]
    norms = torch.linalg.vector_norm(rows, norm_type, dim=1)
    return (norms, remainder) if remainder.numel() else (norms,)


def _counted_once(
    items: Mapping[str, Items], context: ParallelContext, sharded: bool
) -> dict[AxisGroup, list[list[Tensor]]]:
    """Return group -> the gradients of each key that this rank counts. The ranks of a group
    together count every gradient once.
    """
    groups = norm_groups(context, sharded)
    counted: dict[AxisGroup, list[list[Tensor]]] = {
        group: [[] for _ in items] for group in groups.values()
    }
    for index, of_key in enumerate(items.values()):
        for gradient, spec in of_key:
            if is_writer(spec, context):
                counted[groups[spec.model_axes]][index].append(gradient)
    return counted


def _norms_over(
    group: AxisGroup, gradients: Sequence[Sequence[Tensor]], context: ParallelContext, p: float
) -> Tensor:
    """Return the p-norm of each list of gradients over the ranks of a group, in one message."""
    norms = torch.stack([_norm(own, p).to(context.device) for own in gradients])
    if group.process_group is None:
        return norms
    norms = norms.float()  # one dtype on all ranks, also on ranks without a gradient
    if p == float("inf"):
        dist.all_reduce(norms, dist.ReduceOp.MAX, group=group.process_group)
        return norms
    powers = norms.pow(p)
    dist.all_reduce(powers, group=group.process_group)
    return powers.pow(1.0 / p)


def _norm(gradients: Sequence[Tensor], p: float) -> Tensor:
    pieces = [piece for gradient in gradients for piece in _pieces(gradient, p)]
    return torch.nn.utils.get_total_norm(pieces, p)
