"""Layers of adapters, without values."""

from __future__ import annotations

import torch
from torch import nn

from megatron_lightning.layers.moe.experts import GroupedLinear


def factor_of(layer: nn.Module, inputs: int, outputs: int) -> nn.Module:
    """Return a linear layer with dtype and device of ``layer``, or a linear layer for each expert
    of one.
    """
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    if isinstance(layer, GroupedLinear):
        return grouped_factor(
            len(weight), inputs, outputs, weight, one_by_one=layer.gemm.one_by_one
        )
    factor = nn.Linear(inputs, outputs, bias=False, device="meta", dtype=weight.dtype)
    return factor.to_empty(device=weight.device)


def grouped_factor(
    num_experts: int, inputs: int, outputs: int, like: torch.Tensor, *, one_by_one: bool = False
) -> nn.Module:
    """Return a linear layer for each expert, with dtype and device of ``like``."""
    with torch.device("meta"):
        layer = GroupedLinear(num_experts, inputs, outputs, bias=False, one_by_one=one_by_one)
    return layer.to(like.dtype).to_empty(device=like.device)
