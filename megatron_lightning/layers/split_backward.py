"""Linear layers whose backward can be split: the input's gradient at once, the weight's when the pipeline schedule says so.

What a layer puts off, and where, is described in :mod:`megatron_lightning.pipeline.weight_gradients`. A layer that can is
:class:`Splittable`; plain ``nn.Linear`` layers become so by :func:`split_backwards`.

A compiled layer puts off, too. What a traced backward computes is fixed, so its graph calls an operator that the compiler
neither looks into, nor drops, nor moves before another of its kind: it takes the two operands of the weight's gradient out of
the graph. Nothing else of the layer is opaque: its products and collectives are traced as ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_lightning.compat import never_drop
from megatron_lightning.errors import PipelineError
from megatron_lightning.pipeline.weight_gradients import WeightGradients


class Splittable:
    """A layer y = x W^T whose weight's gradient can be put off."""

    weight: Tensor
    hidden_weight: HiddenWeight | None = None
    """Set while gradients may be put off."""

    def whole_input(self, x: Tensor) -> Tensor:
        """Return what the weight was multiplied with, from what the layer was given."""
        return x


@dataclass(frozen=True)
class Owner:
    """The parameter of a layer, hidden from autograd: no edge leads to it, and its gradient is delivered here.

    An edge along which no gradient comes would still make the parameter's hooks fire.
    """

    parameter: nn.Parameter
    store: WeightGradients
    whole_input: Callable[[Tensor], Tensor]

    def deliver(self, grad: Tensor, x: Tensor) -> None:
        """Let the store compute the parameter's gradient from the output's gradient and the layer's input."""
        self.store.deliver(self.parameter, lambda: rows(grad).t().matmul(rows(self.whole_input(x))))


class HiddenWeight:
    """The weight of one layer as a compiled graph takes it: without an edge to the parameter, and with a number to find it by.

    Copies and pickles of the layer have None in its place: they are no part of the pipeline.
    """

    def __init__(self, layer: Splittable, store: WeightGradients) -> None:
        self._layer, self.store = weakref.ref(layer), store
        self.number = torch.tensor(id(self), device="cpu")
        """A tensor, so that layers of one shape share one graph; on the CPU, where it is read."""
        self.value = layer.weight.detach()
        """The parameter's values, made outside of the graph: each of its inputs that takes a gradient has an edge."""
        _HIDDEN[id(self)] = self
        store.holders.add(self)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def renew(self) -> None:
        """Look at the parameter again, whose memory may be another now."""
        layer = self._layer()
        if layer is not None:
            self.value = layer.weight.detach()

    def deliver(self, grad: Tensor, x: Tensor) -> None:
        """Do as :meth:`Owner.deliver`, in a compiled graph."""
        torch.ops.megatron_lightning.put_off_weight_gradient(grad, x, self.number)

    def owner(self) -> Owner:
        """Return the layer's parameter as it is now.

        Raises:
            PipelineError: If the layer is gone.
        """
        layer = self._layer()
        if layer is None:
            raise PipelineError(
                "a layer was deleted between its forward and its backward, so its weight's gradient has no place."
            )
        parameter = cast(nn.Parameter, layer.weight)  # it was one when it was hidden
        return Owner(parameter, self.store, layer.whole_input)


# Operators take tensors and numbers, so a number stands for an object, as a name does for a process group. Those of layers
# that are gone vanish from here.
_HIDDEN: weakref.WeakValueDictionary[int, HiddenWeight] = weakref.WeakValueDictionary()


@torch.library.custom_op(
    "megatron_lightning::put_off_weight_gradient",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor number) -> ()",
)
def _put_off_weight_gradient(grad: Tensor, x: Tensor, number: Tensor) -> None:
    """Deliver copies of the operands: the compiler may use their memory again as soon as this returns.

    Raises:
        PipelineError: If a CUDA graph is recorded, which would replay the layer's kernels and not this.
    """
    if grad.is_cuda and torch.cuda.is_current_stream_capturing():
        raise PipelineError(
            "a compiled layer is recorded as a CUDA graph, which cannot put off weight gradients when it is replayed. Compile "
            'without mode="reduce-overhead" or "max-autotune", or set pipeline_schedule to "1f1b" or "interleaved".'
        )
    _HIDDEN[int(number)].owner().deliver(grad.clone(), x.clone())


@_put_off_weight_gradient.register_fake
def _(grad: Tensor, x: Tensor, number: Tensor) -> None:
    return None


never_drop(torch.ops.megatron_lightning.put_off_weight_gradient.default)


def rows(x: Tensor) -> Tensor:
    """Return [..., n] as [m, n]."""
    return x.reshape(-1, x.shape[-1])


def hide(x: Tensor, layer: Splittable) -> tuple[Tensor, Owner | HiddenWeight | None]:
    """Return what ``layer`` computes with on input ``x``, and who takes the weight's gradient if it can be put off.

    It cannot where autograd would not come to the layer without an edge from the weight, and where the weight is computed from
    others (weight norm, say).
    """
    weight, hidden = layer.weight, layer.hidden_weight if torch.is_grad_enabled() else None
    if hidden is None or not (x.requires_grad and weight.requires_grad and isinstance(weight, nn.Parameter)):
        return weight, None
    if torch.compiler.is_compiling():
        return hidden.value, hidden
    return weight.detach(), Owner(weight, hidden.store, layer.whole_input)


class _Linear(torch.autograd.Function):
    """x W^T + b, computed in the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, owner: Owner | HiddenWeight) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.owner = owner
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = grad.matmul(weight.to(grad.dtype))
        ctx.owner.deliver(grad, x)
        return grad_x, None, rows(grad).sum(0) if ctx.needs_input_grad[2] else None, None


def linear(x: Tensor, layer: Splittable, bias: Tensor | None) -> Tensor:
    """Map x [..., in] to x W^T + b [..., out] with the layer's weight, whose gradient can be put off."""
    weight, owner = hide(x, layer)
    if owner is None:
        return F.linear(x, weight, bias)
    device = x.device.type
    if torch.is_autocast_enabled(device):  # the weight is cast inside, so that its gradient is the parameter's own
        x = x.to(torch.get_autocast_dtype(device))
    y: Tensor = _Linear.apply(x, weight, bias, owner)  # type: ignore[no-untyped-call]
    return y


class SplitLinear(Splittable, nn.Linear):
    """An ``nn.Linear`` whose backward can be split; a layer becomes one, and plain again, by a change of class."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return linear(x, self, self.bias)


def split_backwards(root: nn.Module, store: WeightGradients) -> tuple[list[str], list[str]]:
    """Let all linear layers in ``root`` put off their weight gradients in ``store``.

    Returns:
        Names of the modules that do, and of those that have matrices of their own and compute everything at once: layers of
        other kinds, and subclasses of ``nn.Linear``, whose forward may be anything. Embeddings are in neither list.
    """
    split, whole = [], []
    for name, module in root.named_modules():
        if type(module) is nn.Linear:
            module.__class__ = SplitLinear
        if isinstance(module, Splittable):
            module.hidden_weight = HiddenWeight(module, store)
            split.append(name)
        elif not isinstance(module, nn.Embedding) and any(
            p.ndim > 1 and p.requires_grad for p in module.parameters(recurse=False)
        ):
            whole.append(name)
    return split, whole


def join_backwards(root: nn.Module) -> None:
    """Undo :func:`split_backwards`."""
    for module in root.modules():
        if isinstance(module, Splittable):
            vars(module).pop("hidden_weight", None)
        if type(module) is SplitLinear:
            module.__class__ = nn.Linear  # type: ignore[assignment]
