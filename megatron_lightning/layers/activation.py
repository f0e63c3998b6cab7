"""Activation functions of feed-forward networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

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


class _Kind(NamedTuple):
    """An activation of the gate, and the gradient of the gate."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    """Function of the output's gradient and the gate."""


def _quick_gelu(x: Tensor) -> Tensor:
    return x * (_QUICK * x).sigmoid()


def _quick_gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    out: Tensor = torch.ops.aten.silu_backward(grad, _QUICK * x)
    return out


_QUICK = 1.702
_KINDS: Mapping[str, _Kind] = {
    "swiglu": _Kind(F.silu, torch.ops.aten.silu_backward),
    "geglu": _Kind(F.gelu, torch.ops.aten.gelu_backward),
    "geglu_tanh": _Kind(
        partial(F.gelu, approximate="tanh"),
        partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    ),
    "quick_geglu": _Kind(_quick_gelu, _quick_gelu_backward),
}


class _GatedUnit(torch.autograd.Function):
    """A gated unit that saves only the input. Backward recomputes the activated gate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: GatedUnit) -> Tensor:
        ctx.save_for_backward(x)
        ctx.unit = unit
        return unit.compute(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        unit: GatedUnit = ctx.unit
        (gate, up), limit = x.chunk(2, dim=-1), unit.limit
        limited, value = unit.limited(x)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(grad, unit.kind.forward(limited), out=grad_up)
        grad_gate.copy_(unit.kind.backward(grad * value, limited))
        if limit is not None:
            grad_gate.masked_fill_(gate > limit, 0.0)
            grad_up.masked_fill_(up.abs() > limit, 0.0)
        return grad_x, None


class GatedUnit(nn.Module):
    """An activation of a gate times a value (https://arxiv.org/abs/2002.05202).

    Args:
        activation: A gated activation of ``TransformerConfig``.
        limit: Largest gate, and largest absolute value. None: unlimited.
        offset: Added to the value.
    """

    def __init__(self, activation: str, *, limit: float | None = None, offset: float = 0.0) -> None:
        super().__init__()
        self.kind = _KINDS[activation]
        self.limit = limit
        self.offset = offset

    def limited(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return gate and value of [..., 2f] within the limits, the value with the offset."""
        gate, up = x.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate, up + self.offset if self.offset else up

    def compute(self, x: Tensor) -> Tensor:
        """Return [..., f] by operations that each have a gradient."""
        gate, up = self.limited(x)
        return self.kind.forward(gate) * up

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., 2f], the gate first, to [..., f]."""
        if torch.compiler.is_compiling():  # the compiler fuses the operations
            return self.compute(x)
        out: Tensor = _GatedUnit.apply(x, self)  # type: ignore[no-untyped-call]
        return out


class SquaredReLU(nn.Module):
    """The square of ReLU (https://arxiv.org/abs/2109.08668)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., f] to [..., f]."""
        return F.relu(x).square()


def build_activation(config: TransformerConfig) -> nn.Module:
    """Return the activation between two linear layers. A gated activation halves the width."""
    limit, offset = config.activation_func_clamp_value, config.glu_linear_offset
    if config.activation == "swiglu" and limit is None and not offset:
        return SwiGLU()
    if config.gated:
        return GatedUnit(config.activation, limit=limit, offset=offset)
    if config.activation == "squared_relu":
        return SquaredReLU()
    if config.activation == "silu":
        return nn.SiLU()
    return nn.GELU("tanh" if config.activation == "gelu_tanh" else "none")
