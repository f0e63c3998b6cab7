"""Activation functions of feed-forward networks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_lightning.config import TransformerConfig


class _SwiGLU(torch.autograd.Function):
    """SwiGLU that saves only the input.

    Backward recomputes the activated gate, and writes the gradients of gate and up into one tensor,
    as the previous layer reads them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.mul(grad, up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_x


class SwiGLU(nn.Module):
    """SiLU of a gate times a value (https://arxiv.org/abs/2002.05202)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., 2f], the gate first, to [..., f]."""
        if torch.compiler.is_compiling():  # the compiler fuses the operations
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up
        out: Tensor = _SwiGLU.apply(x)  # type: ignore[no-untyped-call]
        return out


def build_activation(config: TransformerConfig) -> nn.Module:
    """Return the activation between two linear layers. A gated activation halves the width."""
    if config.gated:
        return SwiGLU()
    return nn.GELU("tanh" if config.activation == "gelu_tanh" else "none")
