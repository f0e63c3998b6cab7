"""GEMMs of activations with weights, for every layer. A precision replaces only these GEMMs.

A linear layer Y = X W^T has three GEMMs,

    forward      Y  = X W^T       contracts the input's features
    input_grad   dX = dY W        contracts the output's features
    weight_grad  dW = dY^T X      contracts the tokens

and owns a :class:`Gemm` to compute them. The gemm first makes an *operand* of each tensor, then
multiplies operands. In between, layers gather operands, save them for backward and defer GEMMs
without looking inside:

    x --operand--> (data, scales) --gather--> (data, scales) --forward--> y
                          `--- kept, gathered again --------> weight_grad

Here an operand is the tensor itself. A quantizing gemm makes quantized data and scales, so that a
gather sends quantized data. A quantizing gemm inherits from :class:`Gemm`, is assigned to
``layer.gemm``, and holds the layer's scaling state across steps. If scales lie along the contracted
dim, the two GEMMs of a tensor need two operands (``two_sided = False``). ``transposed=True`` makes
the second operand from the same tensor. A gather may then send the tensor once instead of two
operands (``gathers_quantized = False``).

With ``counts`` [E] the GEMMs are *grouped*: the weight is [E, out, in], one matrix an expert, and
``counts`` gives the tokens of each expert in the sorted batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.compat import adds_in_fp32, takes_grouped_mm
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.collectives import all_gather_start, finish, reduce_scatter_start
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.shards.stored_weight import StoredWeight

FP32 = torch.float32
Role = Literal["input", "weight", "output_grad"]


class SequenceAxis(NamedTuple):
    """Ranks that share a sequence, and the sequence dim."""

    group: AxisGroup
    dim: int


class Operand(NamedTuple):
    """A tensor in the form used by GEMMs."""

    data: Tensor
    """The tensor, or its quantized data."""
    scales: Tensor | None = None
    """Scales of the quantized data, with the dims of the data and gathered with the data.

    Scales without dims are equal on all ranks.
    """

    def gather_start(self, axis: SequenceAxis) -> Operand:
        """Begin to concatenate the ranks' operands along the sequence."""
        return self._map(lambda x: all_gather_start(x, *axis))

    def finish(self, axis: SequenceAxis) -> Operand:
        """Wait for :meth:`gather_start`."""
        return self._map(lambda x: finish(x, *axis))

    def gather(self, axis: SequenceAxis | None) -> Operand:
        """Concatenate the ranks' operands along the sequence.

        Without an axis, return the operand.
        """
        return self if axis is None else self.gather_start(axis).finish(axis)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Operand:
        scales = self.scales
        return Operand(
            change(self.data), scales if scales is None or scales.ndim == 0 else change(scales)
        )


class Gemm:
    """The GEMMs of one layer by torch's kernels, in the dtype of the activations.

    Args:
        one_by_one: Loop over experts instead of calling a grouped GEMM.
    """

    two_sided: bool = True
    """Whether one operand of a tensor serves both GEMMs of the tensor."""
    gathers_quantized: bool = True
    """Whether operands are made before the gather, instead of after.

    If False, GEMMs also take operands without scales, and quantize them.
    """
    differentiable: ClassVar[bool] = True
    """Whether the gradients equal autograd's gradients of ``F.linear``."""

    def __init__(self, *, one_by_one: bool = False) -> None:
        self.one_by_one = one_by_one

    def operand(
        self,
        tensor: Tensor,
        role: Role,
        *,
        transposed: bool = False,
        counts: Tensor | None = None,
    ) -> Operand:
        """Return the operand of ``tensor``.

        Args:
            tensor: Input [..., in], weight [out, in] or [E, out, in], or gradient of the output
                [..., out].
            role: Place of the tensor in the GEMMs.
            transposed: Whether the GEMM contracts a dim other than the last: ``weight_grad`` for an
                input or the output's gradient, ``input_grad`` for a weight.
            counts: Tokens of each expert [E], for grouped GEMMs.
        """
        return Operand(tensor.dequantized() if isinstance(tensor, StoredWeight) else tensor)

    def value(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight by which the layer multiplies inputs of ``dtype``, for products beside
        the GEMMs.
        """
        return weight

    def gather_first(
        self, tensor: Tensor, axis: SequenceAxis | None
    ) -> tuple[Tensor, SequenceAxis | None]:
        """Gather ``tensor``, unless the gemm gathers operands.

        Returns:
            The tensor to make operands from, and the remaining axis to gather operands along.
        """
        if axis is None or self.gathers_quantized:
            return tensor, axis
        return Operand(tensor).gather(axis).data, None

    def forward(
        self, x: Operand, weight: Operand, bias: Tensor | None = None, counts: Tensor | None = None
    ) -> Tensor:
        """Return X W^T + b: [..., in], [out, in] -> [..., out].

        Grouped, without a bias: [t, in], [E, out, in] -> [t, out].
        """
        dtype = x.data.dtype
        w = weight.data.to(dtype)
        if counts is not None:
            return self._grouped(x.data, w.transpose(1, 2), counts)
        return F.linear(x.data, w, None if bias is None else bias.to(dtype))

    def input_grad(self, grad: Operand, weight: Operand, counts: Tensor | None = None) -> Tensor:
        """Return dY W: [..., out], [out, in] -> [..., in].

        Grouped: [t, out], [E, out, in] -> [t, in].
        """
        w = weight.data.to(grad.data.dtype)
        return grad.data.matmul(w) if counts is None else self._grouped(grad.data, w, counts)

    def weight_grad(self, grad: Operand, x: Operand, counts: Tensor | None = None) -> Tensor:
        """Return dY^T X: [..., out], [..., in] -> [out, in].

        Grouped: [t, out], [t, in] -> [E, out, in], with zeros for an expert without tokens.
        """
        left, right = rows(grad.data).t(), rows(x.data)
        return left.matmul(right) if counts is None else self._grouped(left, right, counts)

    def _grouped(self, a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
        """Multiply groups: [t, k], [E, k, n] -> [t, n], or [m, t], [t, n] -> [E, m, n]."""
        result: Tensor = torch.ops.megatron_lightning.grouped_mm(a, b, counts, self.one_by_one)
        return result

    def add_weight_grad(self, total: Tensor | None, grad: Operand, x: Operand) -> Tensor:
        """Return ``total`` [out, in] plus dY^T X, added in place, or dY^T X if ``total`` is None.

        The sum is in fp32 or wider.
        """
        left, right = rows(grad.data).t(), rows(x.data)
        if self.differentiable and adds_in_fp32(left) and (total is None or total.dtype == FP32):
            if total is None:
                return torch.mm(left, right, out_dtype=FP32)
            return torch.addmm(total, left, right, out_dtype=FP32, out=total)
        if total is None:
            total = self.weight_grad(grad, x)
            return total.to(torch.promote_types(total.dtype, FP32))
        if self.differentiable and total.dtype == grad.data.dtype:
            return total.addmm_(left, right)
        return total.add_(self.weight_grad(grad, x))


def rows(x: Tensor) -> Tensor:
    """Return [..., n] as [m, n]."""
    return x.reshape(-1, x.shape[-1])


# ----------------------------------------------------------------------------------------- autograd


class WeightOwner(Protocol):
    """Receives the weight gradient of a layer whose weight has no edge in the graph."""

    def deliver(self, grad: Operand, x: Operand, counts: Tensor | None) -> None:
        """Compute ``weight_grad`` of these operands, now or later."""
        ...


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gemm: Gemm,
    *,
    owner: WeightOwner | None = None,
    counts: Tensor | None = None,
    scatter: SequenceAxis | None = None,
) -> Tensor:
    """Return X W^T + b with gradients.

    Args:
        x: Input [..., in].
        weight: [out, in], or with ``counts`` [E, out, in].
        bias: [out]. None with ``counts`` or ``scatter``.
        gemm: GEMMs of the layer.
        owner: Receives the weight gradient. None: autograd receives the gradient.
        counts: Tokens of each expert [E].
        scatter: Reduce-scatter the output along the sequence. The output's gradient is gathered as
            an operand.
    """
    is_plain = owner is None and counts is None and scatter is None
    if gemm.differentiable and is_plain and not isinstance(weight, StoredWeight):
        return F.linear(x, weight, bias)
    x, weight = autocast(x, weight, gemm, owner)
    y: Tensor = _Matmul.apply(x, weight, bias, gemm, owner, counts, scatter)  # type: ignore[no-untyped-call]
    return y


def add_products(weight: Tensor, left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return W + scale L R for each expert: [E, out, in], [E, out, r], [E, r, in] -> [E, out, in].

    The sum and its gradients are in the weight's dtype, with autocast as well.
    """
    with torch.autocast(weight.device.type, enabled=False):
        pair = left.to(weight.dtype), right.to(weight.dtype)
        return torch.baddbmm(weight, *pair, alpha=scale)


def by_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [s, b, n, i] times a matrix for each head, ``weight`` [n, i, o]: [s, b, n, o].

    Only for evaluation. Latent attention reads its up projection with this function, and no
        precision replaces the multiplication.
    """
    return torch.einsum("sbni,nio->sbno", x, weight.to(x.dtype))


def autocast(x: Tensor, weight: Tensor, gemm: Gemm, owner: object | None) -> tuple[Tensor, Tensor]:
    """Cast to autocast's dtype if autocast is on, because backward of a custom Function runs
    without autocast.

    The gemm casts a weight with an owner, so that the gradient has the parameter's dtype. The gemm
    also casts a weight to be quantized, so that the gemm sees the same tensor again and backward
    keeps no copy.

    Raises:
        ConfigError: If the model casts its activations to the dtype of a quantized weight.
    """
    if is_quantized(x.dtype):
        raise ConfigError(
            f"the input of a layer has dtype {x.dtype}: the model casts its activations to the "
            "dtype of a weight, and fp8_param_gather=True keeps weights as quantized data of 8 "
            "bits. Set fp8_param_gather=False."
        )
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x, weight
    dtype = torch.get_autocast_dtype(device)
    # Backward keeps the weight, and no values of a stored weight.
    casts = owner is None and gemm.differentiable and not isinstance(weight, StoredWeight)
    return x.to(dtype), weight.to(dtype) if casts else weight


def is_quantized(dtype: torch.dtype) -> bool:
    """Return whether tensors of a dtype are quantized data and need scales."""
    return dtype.is_floating_point and dtype.itemsize == 1


class _Matmul(torch.autograd.Function):
    """X W^T + b forward, optionally reduce-scattered. Backward multiplies the (gathered)
    gradient.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes by position)
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gemm: Gemm,
        owner: WeightOwner | None,
        counts: Tensor | None,
        scatter: SequenceAxis | None,
    ) -> Tensor:
        operand = gemm.operand(x, "input", counts=counts)
        saved_input: Operand | tuple[None, None] = (None, None)
        if owner is not None or ctx.needs_input_grad[1]:
            saved_input = operand
            if not gemm.two_sided:
                saved_input = gemm.operand(x, "input", transposed=True, counts=counts)
        ctx.save_for_backward(*saved_input, weight, counts)
        ctx.gemm = gemm
        ctx.owner = owner
        ctx.scatter = scatter
        y = gemm.forward(operand, gemm.operand(weight, "weight"), bias, counts)
        return y if scatter is None else finish(reduce_scatter_start(y, *scatter), *scatter)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None]:
        *saved_input, weight, counts = ctx.saved_tensors
        x, gemm, owner, scatter = Operand(*saved_input), ctx.gemm, ctx.owner, ctx.scatter
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = None
        source, axis = gemm.gather_first(grad, scatter)
        operand = gemm.operand(source, "output_grad", counts=counts).gather(axis)
        if need_x:
            w = gemm.operand(weight, "weight", transposed=True)
            grad_x = gemm.input_grad(operand, w, counts)
        if not gemm.two_sided and (need_weight or owner is not None):
            operand = gemm.operand(source, "output_grad", transposed=True, counts=counts)
            operand = operand.gather(axis)
        if need_weight:
            grad_weight = gemm.weight_grad(operand, x, counts)
        elif owner is not None:
            owner.deliver(operand, x, counts)
        grad_bias = rows(grad).sum(0) if need_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None, None


# ------------------------------------------------------------------------------------------ grouped


# An operator, since the shape of the result needs no values. The loop cannot be traced, and torch's
# kernel is traced only for bf16.
@torch.library.custom_op(
    "megatron_lightning::grouped_mm",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor counts, bool one_by_one) -> Tensor",
)
def _grouped_mm(a: Tensor, b: Tensor, counts: Tensor, one_by_one: bool) -> Tensor:
    if not one_by_one and takes_grouped_mm(a) and takes_grouped_mm(b):
        return F.grouped_mm(a, b, offs=counts.cumsum(0, dtype=torch.int32)).contiguous()
    output = _empty_output(a, b, counts)
    sizes = counts.tolist()
    if b.ndim == 3:
        groups = zip(torch.split(a, sizes), b, torch.split(output, sizes), strict=True)
    else:
        groups = zip(torch.split(a, sizes, dim=1), torch.split(b, sizes), output, strict=True)
    for left, right, out in groups:
        torch.mm(left, right, out=out)
    return output


@_grouped_mm.register_fake
def _(a: Tensor, b: Tensor, counts: Tensor, one_by_one: bool) -> Tensor:
    return _empty_output(a, b, counts)


def _empty_output(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    m, n = a.shape[0], b.shape[-1]
    return a.new_empty((m, n) if b.ndim == 3 else (len(counts), m, n))
