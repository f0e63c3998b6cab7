"""Adapters added to the weight of a layer, whose GEMM computes with W + scale B A, such as one that
rounds the sum.

    dW = dY^T X              of one layer at a time
    dA = scale B^T dW        dB = scale dW A^T

The sum exists only inside of the GEMM, and backward keeps the factors alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.adapters.adapter_layers import Adapters, adapters_of, add_adapters
from megatron_lightning.parallel.collectives import copy_to_axis
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.shards.spec import ShardSpec


def add_to_weight(layer: nn.Module, adapters: Adapters) -> None:
    """Make a layer add its adapters to its weight, and not to its output."""
    adapters.in_weight = True
    layer.register_forward_pre_hook(set_weight)
    layer.register_forward_hook(remove_weight, always_call=True)


def summed(layer: nn.Module, weight: Tensor) -> Tensor:
    """Return W + scale B A of a layer in fp32, or ``weight`` without adapters. As in merged files.

    Raises:
        ConfigError: If ranks hold other rows of the factors than of the weight.
    """
    adapters = _enabled(layer)
    if adapters is None:
        return weight
    deltas = (part.delta() for part in adapters.parts.values())
    products = [delta.second @ delta.first for delta in deltas]
    delta = _joined(products, adapters.num_groups)
    if delta.shape != weight.shape:
        raise ConfigError(
            f"adapters of {type(layer).__name__} have {list(delta.shape)} rows and columns on this "
            f"rank, and the weight has {list(weight.shape)}: ranks share the rows of a projection. "
            "Set tensor_model_parallel_size to at most the number of query groups, or leave qat "
            "out."
        )
    return weight.to(torch.float32, copy=True).add_(delta)


def factors_of(layer: nn.Module) -> tuple[Tensor, ...]:
    """Return the factors in the sum of a layer. Empty: the sum is the weight."""
    adapters = _enabled(layer)
    return () if adapters is None else tuple(adapters.parameters())


def _enabled(layer: nn.Module) -> Adapters | None:
    """Return the adapters that a layer computes with. None: none.

    Raises:
        ConfigError: If only half of the rows have adapters.
    """
    adapters = adapters_of(layer)
    if adapters is None or not adapters.enabled:
        return None
    if adapters.half_dim is not None:
        raise ConfigError(
            "qat adds adapters to the weight of a layer, for all rows alike, and half of the rows "
            "here are those of a reference without adapters. Set the reference of the module to "
            '"model" or "scores".'
        )
    return adapters


def _joined(parts: list[Tensor], num_groups: int) -> Tensor:
    """Return the rows of parts [..., rows, in] in the order of the weight's rows."""
    if num_groups and len(parts) > 1:
        columns = parts[0].shape[-1]
        parts = [part.reshape(num_groups, -1, columns) for part in parts]
        return torch.cat(parts, dim=-2).flatten(0, 1)
    return torch.cat(parts, dim=-2)


def _divided(rows: Tensor, sizes: list[int], num_groups: int) -> tuple[Tensor, ...]:
    """Undo :func:`_joined`."""
    if num_groups and len(sizes) > 1:
        grouped = rows.reshape(num_groups, -1, rows.shape[-1])
        parts = torch.split(grouped, [size // num_groups for size in sizes], dim=-2)
        return tuple(part.flatten(0, 1) for part in parts)
    return torch.split(rows, sizes, dim=-2)


def set_weight(layer: nn.Module, args: tuple[Any, ...]) -> None:
    """Forward pre-hook: give the weight an edge to the factors."""
    adapters = _enabled(layer)
    if adapters is None or not torch.is_grad_enabled():
        return
    factors = [
        _whole(layer, factor, dim)
        for part in adapters.parts.values()
        for factor, dim in ((part.inputs[0], -2), (part.outputs[0], -1))
    ]
    scales = [part.scale for part in adapters.parts.values()]
    weight: Any = layer._parameters["weight"]
    vars(layer)["weight"] = _Adapted.apply(weight, scales, adapters.num_groups, *factors)  # type: ignore[no-untyped-call]


def remove_weight(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook: the name holds the parameter again."""
    vars(layer).pop("weight", None)


def _whole(layer: nn.Module, factor: nn.Module, dim: int) -> Tensor:
    """Return the weight of a factor. The gradient of one that is full beside a part of W is summed
    over the ranks with the other parts, unless its spec declares a partial sum.
    """
    weight: Tensor = factor.weight  # type: ignore[assignment]
    spec: ShardSpec | None = getattr(layer, "shard_specs", {}).get("weight")
    own: ShardSpec | None = getattr(factor, "shard_specs", {}).get("weight")
    group = getattr(layer, "group", None)
    is_divided = spec is not None and spec.boxes[0].shape[dim] != spec.global_shape[dim]
    if not is_divided or not isinstance(group, AxisGroup) or group.size == 1:
        return weight
    is_declared = own is not None and group.name in own.partial_over
    return weight if is_declared else copy_to_axis(weight, group)


class _Adapted(torch.autograd.Function):
    """The weight itself, whose gradient goes to the factors (A, B) of each part."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, scales: list[float], num_groups: int, *factors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*factors)
        ctx.scales, ctx.num_groups = scales, num_groups
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        factors = ctx.saved_tensors
        pairs = list(zip(factors[::2], factors[1::2], strict=True))
        sizes = [second.shape[-2] for _, second in pairs]
        parts = _divided(grad.float(), sizes, ctx.num_groups)
        grads: list[Tensor] = []
        for (first, second), scale, part in zip(pairs, ctx.scales, parts, strict=True):
            grads.append((second.float().mT @ part).mul_(scale).to(first.dtype))
            grads.append((part @ first.float().mT).mul_(scale).to(second.dtype))
        return None, None, None, *grads


HOOKS_OF_ADAPTERS = (add_adapters, set_weight, remove_weight)
"""Hooks that take shards, since adapters are divided with their layers."""
