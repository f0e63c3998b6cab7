"""Bytes that a real layer keeps for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_lightning.layers.attention.rotary import RotaryEmbedding


def kept_bytes(layer: nn.Module, *, batch: int, sequence: int) -> float:
    """Return the bytes that a layer keeps, without weights and the rotary tables of all layers."""
    others = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept: dict[int, Tensor] = {}  # alive, so that no address comes twice

    def leave_out(_: nn.Module, __: Any, tables: tuple[Tensor, ...]) -> None:
        others.update(table.untyped_storage().data_ptr() for table in tables)

    def pack(saved: Tensor) -> Tensor:
        if saved.untyped_storage().data_ptr() not in others:
            kept[saved.untyped_storage().data_ptr()] = saved
        return saved

    for module in layer.modules():
        if isinstance(module, RotaryEmbedding):
            module.register_forward_hook(leave_out)
    hidden_size = next(layer.parameters()).shape[-1]  # of the first norm
    with saved_tensors_hooks(pack, lambda saved: saved):
        layer(torch.zeros(sequence, batch, hidden_size, requires_grad=True))
    return float(sum(saved.untyped_storage().nbytes() for saved in kept.values()))
