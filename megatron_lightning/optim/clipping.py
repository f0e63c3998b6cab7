"""Gradient norm over every axis without double counting, and clipping.

A gradient counts once, as in megatron/core/optimizer/clip_grads.py: never on the holder of a tied
copy, and only on the first of several ranks with equal parameters. Norms of sharded gradients are
also summed over the data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.shards.spec import ShardSpec, is_writer

_ROW = 16384
"""Elements per partial sum of a norm on a CPU."""


def global_grad_norm(
    items: Iterable[tuple[Tensor, ShardSpec]],
    context: ParallelContext,
    *,
    sharded: bool,
    norm_type: float = 2.0,
) -> Tensor:
    """Return the norm of all gradients of the model, equal on every rank. A collective.

    Args:
        items: (reduced gradient, spec of the parameter) of this rank's optimizers.
        context: The groups of this rank.
        sharded: Whether data-parallel ranks hold different shards of the gradients.
        norm_type: p of the p-norm. ``math.inf`` for the largest absolute value.

    Returns:
        A scalar tensor on the context's device.
    """
    if norm_type <= 0:
        raise ConfigError(
            f"norm_type is {norm_type}; a norm over several ranks needs a positive order. Set 2.0 "
            "or inf."
        )
    groups = norm_groups(context, sharded)
    gradients: dict[AxisGroup, list[Tensor]] = {group: [] for group in groups.values()}
    for gradient, spec in items:
        if is_writer(spec, context):
            gradients[groups[spec.model_axes]].append(gradient)
    norms = [_norm_over(group, tensors, context, norm_type) for group, tensors in gradients.items()]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)


def global_zero_count(
    items: Iterable[tuple[Tensor, ShardSpec]], context: ParallelContext, *, sharded: bool
) -> Tensor:
    """Return how many elements of all gradients of the model are zero, equal on every rank. A
    collective.

    The arguments equal the arguments of :func:`global_grad_norm`. The result is an int64 scalar.
    """
    groups = norm_groups(context, sharded)
    counts = {
        group: torch.zeros((), dtype=torch.int64, device=context.device)
        for group in groups.values()
    }
    for gradient, spec in items:
        if is_writer(spec, context):
            counts[groups[spec.model_axes]] += (gradient == 0).sum()
    for group, count in counts.items():
        if group.process_group is not None:
            dist.all_reduce(count, group=group.process_group)
    return torch.stack(list(counts.values())).sum()


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


def _norm_over(
    group: AxisGroup, gradients: list[Tensor], context: ParallelContext, norm_type: float
) -> Tensor:
    pieces = [piece for gradient in gradients for piece in _pieces(gradient, norm_type)]
    norm = torch.nn.utils.get_total_norm(pieces, norm_type).to(context.device)
    if group.process_group is None:
        return norm
    norm = norm.float()  # one dtype on all ranks, also on ranks without a gradient
    if norm_type == float("inf"):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=group.process_group)
        return norm
    power = norm.pow(norm_type)
    dist.all_reduce(power, group=group.process_group)
    return power.pow(1.0 / norm_type)
