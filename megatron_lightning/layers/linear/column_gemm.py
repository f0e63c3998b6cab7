"""The GEMMs of a column-parallel layer, with overlapped collectives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.layers.linear.gemm import Gemm, Operand, SequenceAxis, WeightOwner, rows
from megatron_lightning.parallel.collectives import (
    all_reduce_start,
    finish,
    keeps_shard,
    reduce_scatter_start,
)
from megatron_lightning.parallel.grid.context import AxisGroup


class ColumnGemm(torch.autograd.Function):
    """Linear layer on the copied (or gathered) input in forward.

    The input's gradient is all-reduced (or reduce-scattered) in backward.

    The input is gathered as an operand. If backward holds only the shard, the operand is gathered
    again while the input's gradient is computed. The reduction of the input's gradient then
    overlaps with the weight gradient. A deferred weight gradient gathers the operand when the
    gradient is computed.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes by position)
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gemm: Gemm,
        owner: WeightOwner | None,
        group: AxisGroup,
        axis: SequenceAxis | None,
    ) -> Tensor:
        """Return the GEMM with the full input."""
        source, late_axis = gemm.gather_first(x, axis)
        operand = gemm.operand(source, "input")
        full_input = operand.gather(late_axis)
        y = gemm.forward(full_input, gemm.operand(weight, "weight"), bias)
        ctx.gathers = axis is not None and keeps_shard(x, deferred=owner is not None)
        needed = owner is not None or ctx.needs_input_grad[1]
        # For the weight gradient the input is kept as this rank's shard where backward gathers it
        # again, and in full otherwise. Formats with different data by rows and by columns need the
        # transposed operand there.
        if needed and ctx.gathers and not gemm.gathers_quantized:
            operand = Operand(x)  # quantized after the second gather
        elif needed and not gemm.two_sided:
            operand = gemm.operand(source, "input", transposed=True)
            full_input = operand if ctx.gathers else operand.gather(late_axis)
        saved_operand = operand if ctx.gathers else full_input
        ctx.save_for_backward(*(saved_operand if needed else (None, None)), weight)
        ctx.gemm = gemm
        ctx.owner = owner
        ctx.group = group
        ctx.axis = axis
        return y

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None]:
        """Return the gradients of input, weight and bias."""
        *saved_input, weight = ctx.saved_tensors
        x, gemm, owner, group, axis = (
            Operand(*saved_input),
            ctx.gemm,
            ctx.owner,
            ctx.group,
            ctx.axis,
        )
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = None
        # Order for overlap: the gather of the input runs beside the GEMM of the input gradient, and
        # the reduction of the input gradient beside the GEMM of the weight gradient.
        if ctx.gathers and need_weight:
            started = x.gather_start(axis)
        operand = gemm.operand(grad, "output_grad")
        if need_x:
            grad_x = gemm.input_grad(operand, gemm.operand(weight, "weight", transposed=True))
            grad_x = (
                all_reduce_start(grad_x, group)
                if axis is None
                else reduce_scatter_start(grad_x, *axis)
            )
        if not gemm.two_sided and (need_weight or owner is not None):
            operand = gemm.operand(grad, "output_grad", transposed=True)
        if need_weight:
            grad_weight = gemm.weight_grad(operand, started.finish(axis) if ctx.gathers else x)
        # A split backward: the weight gradient is computed in the schedule's W.
        elif owner is not None:
            owner.deliver(operand, x, None)
        grad_bias = rows(grad).sum(0) if need_bias else None
        if grad_x is not None:
            grad_x = finish(grad_x, group, 0 if axis is None else axis.dim)
        return grad_x, grad_weight, grad_bias, None, None, None, None
