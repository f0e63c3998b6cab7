"""Linear layers whose backward can be split: the input's gradient at once, the weight's when the pipeline schedule says so.

What a layer puts off, and where, is described in :mod:`megatron_lightning.pipeline.weight_gradients`. Layers of this package
have an attribute ``weight_gradients`` for the ledger; plain ``nn.Linear`` layers get one by :func:`split_backwards`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_lightning.pipeline.weight_gradients import WeightGradients


def rows(x: Tensor) -> Tensor:
    """Return [..., n] as [m, n]."""
    return x.reshape(-1, x.shape[-1])


@dataclass(frozen=True)
class Owner:
    """The parameter of a layer, hidden from autograd: no edge leads to it, and its gradient is delivered here.

    An edge along which no gradient comes would still make the parameter's hooks fire.
    """

    parameter: nn.Parameter
    ledger: WeightGradients

    def deliver(self, product: Callable[[], Tensor]) -> None:
        """Put off the gradient that ``product`` returns; outside of a schedule, compute it."""
        if self.ledger.collecting:
            self.ledger.put_off(self.parameter, product)
        else:
            torch.autograd.backward(self.parameter, product())


def hide(x: Tensor, weight: Tensor, ledger: WeightGradients | None) -> tuple[Tensor, Owner | None]:
    """Return what a layer on input ``x`` computes with, and the owner if the gradient of ``weight`` can be put off.

    It cannot where autograd would not come to the layer without that edge, and where the weight is computed from others
    (weight norm, say).
    """
    if ledger is None or not (x.requires_grad and weight.requires_grad and isinstance(weight, nn.Parameter)):
        return weight, None
    return weight.detach(), Owner(weight, ledger)


class _Linear(torch.autograd.Function):
    """x W^T + b, computed in the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, owner: Owner) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.owner = owner
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = grad.matmul(weight.to(grad.dtype))
        ctx.owner.deliver(lambda: rows(grad).t().matmul(rows(x)))
        return grad_x, None, rows(grad).sum(0) if ctx.needs_input_grad[2] else None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, ledger: WeightGradients | None) -> Tensor:
    """Map x [..., in] to x W^T + b [..., out]; with a ledger, the gradient of ``weight`` can be put off."""
    weight, owner = hide(x, weight, ledger if torch.is_grad_enabled() else None)
    if owner is None:
        return F.linear(x, weight, bias)
    device = x.device.type
    if torch.is_autocast_enabled(device):  # the weight is cast inside, so that its gradient is the parameter's own
        x = x.to(torch.get_autocast_dtype(device))
    y: Tensor = _Linear.apply(x, weight, bias, owner)  # type: ignore[no-untyped-call]
    return y


class SplitLinear(nn.Linear):
    """An ``nn.Linear`` whose backward can be split; a layer becomes one, and plain again, by a change of class."""

    weight_gradients: WeightGradients | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return linear(x, self.weight, self.bias, self.weight_gradients)


def split_backwards(root: nn.Module, ledger: WeightGradients) -> tuple[list[str], list[str]]:
    """Let all linear layers in ``root`` put off their weight gradients in ``ledger``.

    Returns:
        Names of the modules that do, and of those that have matrices of their own and compute everything at once: layers of
        other kinds, and subclasses of ``nn.Linear``, whose forward may be anything. Embeddings are in neither list.
    """
    split, whole = [], []
    for name, module in root.named_modules():
        if type(module) is nn.Linear:
            module.__class__ = SplitLinear
        if hasattr(type(module), "weight_gradients"):
            module.weight_gradients = ledger
            split.append(name)
        elif not isinstance(module, nn.Embedding) and any(
            p.ndim > 1 and p.requires_grad for p in module.parameters(recurse=False)
        ):
            whole.append(name)
    return split, whole


def join_backwards(root: nn.Module) -> None:
    """Undo :func:`split_backwards`."""
    for module in root.modules():
        if hasattr(type(module), "weight_gradients"):
            vars(module).pop("weight_gradients", None)
        if type(module) is SplitLinear:
            module.__class__ = nn.Linear  # type: ignore[assignment]
