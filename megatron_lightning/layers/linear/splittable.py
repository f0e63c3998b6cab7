"""Linear layers with a split backward: the input's gradient at once, the weight gradient when the
pipeline schedule asks.

:mod:`megatron_lightning.pipeline.weight_gradients` describes the deferred GEMMs. Layers with
deferrable GEMMs are :class:`Splittable`. :mod:`megatron_lightning.layers.linear.split_backward`
makes the layers of a model defer.

Compiled layers defer, too. A traced backward is fixed, so its graph calls an operator that the
compiler neither inspects, nor drops, nor reorders with similar operators. The operator takes the
two operands of the weight gradient out of the graph. The rest of the layer, with GEMMs and
collectives, is traced as usual.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from megatron_lightning.compat import never_drop
from megatron_lightning.errors import ConfigError, PipelineError
from megatron_lightning.layers.engine import Engine
from megatron_lightning.layers.linear.gemm import Gemm, Operand, SequenceAxis, is_quantized, matmul
from megatron_lightning.pipeline.weight_gradients import WeightGradients


class Splittable:
    """A layer y = x W^T with a deferrable weight gradient."""

    weight: Tensor
    gemm: Gemm = Gemm()
    """GEMMs of the layer."""
    engine: Engine | None = None
    """Computes the layer instead of ``gemm``."""
    hidden_weight: HiddenWeight | None = None
    """Set while gradients may be deferred."""

    def full_input(self, kept: Operand) -> Operand:
        """Return the full input operand of the GEMM from the saved operand ``kept``."""
        return kept


@dataclass(frozen=True)
class Owner:
    """The parameter of a layer, hidden from autograd. Receives the parameter's gradient.

    With an autograd edge to the parameter, the parameter's hooks would fire without a gradient.
    """

    parameter: nn.Parameter
    store: WeightGradients
    layer: Splittable

    def deliver(self, grad: Operand, x: Operand, counts: Tensor | None) -> None:
        """Deliver the matmul of the output's gradient and the layer's input to the store."""
        layer = self.layer
        self.store.deliver(
            self.parameter, lambda: layer.gemm.weight_grad(grad, layer.full_input(x), counts)
        )


class HiddenWeight:
    """The weight of one layer for a compiled graph: values without an edge to the parameter, and an
    identifying number.

    Copies and pickles of the layer hold None instead, because copies do not belong to the pipeline.

    Args:
        layer: The layer.
        store: Receives the gradient.
        defers: Whether the gradient may be deferred. If not, the weight is only hidden from
            compiled graphs.
    """

    def __init__(self, layer: Splittable, store: WeightGradients, *, defers: bool = True) -> None:
        self._layer = weakref.ref(layer)
        self.store = store
        self.defers = defers
        self.number = torch.tensor(id(self), device="cpu")
        """A tensor, so that layers of equal shape share a graph.

        On the CPU, because the CPU reads the number.
        """
        self.value = layer.weight.detach()
        """The parameter's values, detached outside of the graph, because every graph input with a
        gradient has an edge.
        """
        _HIDDEN[id(self)] = self
        store.holders.add(self)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def renew(self) -> None:
        """Read the parameter again after its memory may have changed."""
        layer = self._layer()
        if layer is not None:
            self.value = layer.weight.detach()

    def deliver(self, grad: Operand, x: Operand, counts: Tensor | None) -> None:
        """Do as :meth:`Owner.deliver`, in a compiled graph."""
        torch.ops.megatron_lightning.defer_weight_gradient(*grad, *x, counts, self.number)

    def owner(self) -> Owner:
        """Return the owner of the layer's current parameter."""
        layer = cast(Splittable, self._layer())  # alive, because the layer's backward is running
        return Owner(cast(nn.Parameter, layer.weight), self.store, layer)


# Operators take tensors and numbers, so a number represents an object, as a name does a process
# group.
_HIDDEN: weakref.WeakValueDictionary[int, HiddenWeight] = weakref.WeakValueDictionary()


@torch.library.custom_op(
    "megatron_lightning::defer_weight_gradient",
    mutates_args=(),
    schema="(Tensor grad, Tensor? grad_scales, Tensor x, Tensor? x_scales, Tensor? counts, "
    "Tensor number) -> ()",
)
def _defer_weight_gradient(  # noqa: PLR0917 (operators are called by position)
    grad: Tensor,
    grad_scales: Tensor | None,
    x: Tensor,
    x_scales: Tensor | None,
    counts: Tensor | None,
    number: Tensor,
) -> None:
    """Deliver copies of the operands: the compiler may reuse their memory as soon as this returns.

    Raises:
        PipelineError: If a CUDA graph is recorded, because a CUDA graph replays only kernels.
    """
    if grad.is_cuda and torch.cuda.is_current_stream_capturing():
        raise PipelineError(
            "a compiled layer is recorded as a CUDA graph, which cannot defer weight gradients "
            "when it is replayed. Compile "
            'without mode="reduce-overhead" or "max-autotune", or set pipeline_schedule to "1f1b" '
            'or "interleaved".'
        )
    owner = _HIDDEN[int(number)].owner()
    owner.deliver(
        Operand(grad.clone(), _clone(grad_scales)),
        Operand(x.clone(), _clone(x_scales)),
        _clone(counts),
    )


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


@_defer_weight_gradient.register_fake
def _(*operands: Tensor | None) -> None:
    return None


never_drop(torch.ops.megatron_lightning.defer_weight_gradient.default)


def hide(x: Tensor, layer: Splittable) -> tuple[Tensor, Owner | HiddenWeight | None]:
    """Return the weight for ``layer`` on input ``x``, and the owner of the weight gradient if the
    gradient can be deferred.

    The gradient cannot be deferred if autograd would not reach the layer without an edge to the
    weight, or if the weight is computed from others (such as by weight norm).
    """
    weight, hidden = layer.weight, layer.hidden_weight if torch.is_grad_enabled() else None
    is_compiling = torch.compiler.is_compiling()
    if (
        hidden is None
        or not (hidden.defers or is_compiling)
        or not (x.requires_grad and weight.requires_grad and isinstance(weight, nn.Parameter))
    ):
        if is_compiling and weight.requires_grad and is_quantized(weight.dtype):
            raise ConfigError(
                f"a compiled layer has a weight of shape {tuple(weight.shape)} that is kept as "
                "quantized data of 8 bits, and an input without a gradient: its graph would round "
                "the weight's gradient to 8 bits. Leave this layer uncompiled, or set "
                "fp8_param_gather=False."
            )
        return weight, None
    if is_compiling:
        return hidden.value, hidden
    return weight.detach(), Owner(weight, hidden.store, layer)


def linear(
    x: Tensor,
    layer: Splittable,
    bias: Tensor | None,
    *,
    counts: Tensor | None = None,
    scatter: SequenceAxis | None = None,
) -> Tensor:
    """Map x [..., in] to x W^T + b [..., out] with the layer's weight.

    The weight gradient can be deferred. ``counts`` and ``scatter`` as for
    :func:`~megatron_lightning.layers.linear.gemm.matmul`.
    """
    weight, owner = hide(x, layer)
    return matmul(x, weight, bias, layer.gemm, owner=owner, counts=counts, scatter=scatter)
