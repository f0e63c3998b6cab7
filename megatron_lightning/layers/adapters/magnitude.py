"""Trained lengths of the rows of an adapted weight (DoRA, https://arxiv.org/abs/2402.09353).

With the weight W, the adapters' scale B A, and m a trained length for each row:

    y = c (W x + scale B A x) + bias,    c = m / ||W + scale B A||

with the norm of each row, a constant to autograd as in the paper and in ``peft``. m begins as the
norms of W. A row-parallel layer holds a part of each row, and sums squares over the ranks. A frozen
weight in few bits has the norms of its dequantized values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron_lightning.parallel.collectives import all_reduce, gather
from megatron_lightning.parallel.shards.attachments import Attachment
from megatron_lightning.parallel.shards.stored_weight import StoredWeight

if TYPE_CHECKING:
    from megatron_lightning.layers.adapters.adapter_layers import Adapters
    from megatron_lightning.layers.adapters.part import AdapterPart

_FILLED = "_has_magnitudes"


def has_magnitude(adapters: Adapters) -> bool:
    """Return whether the rows of the adapted weight have trained lengths."""
    return any(part.lengths is not None for part in adapters.parts.values())


def scaled_output(layer: nn.Module, adapters: Adapters, output: Tensor, delta: Tensor) -> Tensor:
    """Return the output [..., out] of an adapted layer with trained lengths.

    Args:
        layer: The adapted layer.
        adapters: Its adapters.
        output: Of the layer alone, with the bias.
        delta: Of the adapters.
    """
    with torch.no_grad():
        norms = _norms(layer, adapters)
    lengths = adapters.joined([_lengths(part) for part in adapters.parts.values()])
    factors = lengths.to(norms.dtype) / norms
    bias: Tensor | None = layer.bias  # type: ignore[assignment]
    if getattr(layer, "gather_output", False):  # of a column-parallel layer
        group, size = cast(Any, layer.group), cast(int, layer.out_features)
        factors = gather(factors, group, -1, size)
        bias = None if bias is None else gather(bias, group, -1, size)
    factors = factors.to(output.dtype)
    if bias is None:
        return factors * (output + delta.to(output.dtype))
    bias = bias.to(output.dtype)
    return factors * (output - bias + delta.to(output.dtype)) + bias


def _lengths(part: AdapterPart) -> Tensor:
    lengths: Tensor = part.lengths.weight  # type: ignore[union-attr,assignment]
    return lengths.squeeze(-1)


def _norms(layer: nn.Module, adapters: Adapters) -> Tensor:
    """Return the norms of the rows of W + scale B A that this rank computes, in fp32."""
    deltas = (part.delta() for part in adapters.parts.values())
    # [in, out], so that parts are joined along the last dim, as their outputs are
    products = [delta.first.t() @ delta.second.t() for delta in deltas]
    return _row_norms(layer, _values(layer.weight) + adapters.joined(products).t())


def _values(weight: Any) -> Tensor:
    """Return the values of a weight in fp32."""
    if isinstance(weight, StoredWeight):
        return weight.dequantized(torch.float32)
    values: Tensor = weight.float()
    return values


def _full_values(weight: Any) -> Tensor:
    """Return the values of a weight in fp32, of all shards of FSDP2."""
    if not isinstance(weight, DTensor):
        return _values(weight)
    local = _values(weight.to_local())
    shards = DTensor.from_local(
        local, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride()
    )
    return shards.full_tensor()


def _row_norms(layer: nn.Module, weight: Tensor) -> Tensor:
    squares = weight.square().sum(1)
    if hasattr(layer, "input_is_parallel"):  # a row-parallel layer
        squares = all_reduce(squares, cast(Any, layer.group))
    return squares.sqrt()


@torch.no_grad()
def fill_magnitudes(module: nn.Module) -> None:
    """Set the lengths of rows to the norms of weights, once, when the weights have values.
    A collective.

    Lengths of loaded adapters stay.
    """
    for layer in module.modules():
        adapters: Any = layer._modules.get("adapters")
        if not isinstance(adapters, Attachment) or _FILLED in vars(adapters):
            continue
        parts = {
            name: part
            for name, part in getattr(adapters, "parts", {}).items()
            if part.lengths is not None
        }
        if not parts:
            continue
        # Without values on either side, a later call fills.
        weight: Any = layer.weight
        if weight.is_meta or any(p.is_meta for p in adapters.parameters()):
            continue
        vars(adapters)[_FILLED] = True
        # Norms are of full rows, which FSDP2's shards cut.
        norms = _parts_of(adapters, _row_norms(layer, _full_values(weight)), [*parts.values()])
        for (name, part), norm in zip(parts.items(), norms, strict=True):
            target = part.lengths.weight
            own_name = next(n for n, p in part.named_parameters() if p is target)
            if f"{name}.{own_name}" in cast(Any, adapters).initial:
                continue
            values = norm[:, None].to(target.dtype)
            if isinstance(target, DTensor):
                values = distribute_tensor(values, target.device_mesh, target.placements)
            target.copy_(values)


def _parts_of(adapters: Any, rows: Tensor, parts: list[Any]) -> list[Tensor]:
    """Split values of the layer's rows [out] into values of each part's rows."""
    sizes = [part.lengths.weight.shape[0] for part in parts]
    if not adapters.num_groups:
        return list(torch.split(rows, sizes))
    grouped = rows.view(adapters.num_groups, -1)
    split = torch.split(grouped, [size // adapters.num_groups for size in sizes], dim=1)
    return [part.flatten() for part in split]
