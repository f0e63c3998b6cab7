"""GEMMs of quantized operands on the FP8 units of GPUs, by torch's scaled kernels.

The operands equal the emulation's operands: the same quantized data, bit by bit, with the same
scales. Only the multiplication differs. A training result with one backend therefore holds for the
other, up to the order and the width of the sums:

    forward      y  = x w^T       contracts features      a = x      b = w
    input_grad   dx = dy w        contracts outputs       a = dy     b = w^T
    weight_grad  dw = dy^T x      contracts tokens        a = dy^T   b = x^T

Both a and b have to be contiguous along the contracted dim (see
:mod:`~megatron_lightning.precision.scaled_gemms`). Operands of forward are contiguous already.
Other operands need a written transpose, one byte a value. With scales of rows or blocks, the cast
writes the transpose in the same pass, since the second operand has separate quantized data. With
one scale for a tensor, the transpose is written before the GEMM, so that backward stores only one
set of quantized data.

Nothing here waits for the GPU, except grouped GEMMs without a kernel. Casts and scales are plain
functions of tensors, and ``torch.compile`` fuses casts and scales into surrounding operations.
Without ``torch.compile`` each is a pass over memory, and FP8 is hardly faster than bf16. GEMMs of
forward may use Hopper's 14-bit accumulators (``fast``), because the next layer rounds the output to
8 bits anyway. GEMMs of gradients do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lightning.layers.linear.gemm import Operand, Role, rows
from megatron_lightning.precision.backends import Gpu
from megatron_lightning.precision.emulation import EmulatedGemm
from megatron_lightning.precision.groups import padded_counts
from megatron_lightning.precision.scaled_gemms import (
    BLOCK,
    QuantizedData,
    Shared,
    align_experts,
    column_major,
    multiply,
    multiply_groups,
)


def find_gpu(device: torch.device | None = None) -> Gpu | None:
    """Return the properties that decide which GEMMs a device can run, by default the current
    device. None: the device is not a GPU.
    """
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return None
    version = torch.version.cuda
    return Gpu(
        name=torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device),
        cuda=None if version is None else (*map(int, version.split(".")[:2]),),
    )


class NativeGemm(EmulatedGemm):
    """GEMMs of a layer by a recipe, on FP8 units. The arguments equal the emulation's.

    Recipes are ``delayed``, ``current``, ``rowwise`` and ``blockwise``.
    :func:`~megatron_lightning.precision.backends.choose_backend` selects by GPU.
    """

    def __repr__(self) -> str:
        return f"NativeGemm({self.recipe.scaling}, {self.recipe.format})"

    @property
    def _shared(self) -> Shared:
        if self.recipe.is_per_tensor:
            return "tensor"
        return "row" if self.recipe.scaling == "rowwise" else "block"

    # ------------------------------------------------------------------------------------- operands

    def operand(
        self,
        tensor: Tensor,
        role: Role,
        *,
        transposed: bool = False,
        counts: Tensor | None = None,
    ) -> Operand:
        """See the base class. Second operands are in the layout of their GEMM.

        For experts with ``rowwise``, scales are [E, n].
        """
        data, scales = super().operand(tensor, role, transposed=transposed, counts=counts)
        if not transposed:
            return Operand(data, scales)
        if counts is not None and role != "weight" and self._shared == "row" and scales is not None:
            scales = _of_experts(scales, counts)
        return Operand(column_major(data), scales)

    def _made(
        self, operand: Operand, role: Role, counts: Tensor | None, *, second: bool = False
    ) -> QuantizedData:
        """Return the operand as a matrix. An operand without scales is quantized first."""
        if operand.scales is None:
            operand = self.operand(operand.data, role, transposed=second, counts=counts)
        data, scales = operand
        if scales is None:
            raise ValueError(f"the {role} of {self!r} has no scales.")
        if role == "weight":
            return QuantizedData(data, scales)
        return QuantizedData(rows(data), rows(scales) if scales.ndim else scales)

    # ---------------------------------------------------------------------------------------- GEMMs

    def forward(
        self, x: Operand, weight: Operand, bias: Tensor | None = None, counts: Tensor | None = None
    ) -> Tensor:
        """See the base class."""
        a, b = self._made(x, "input", counts), self._made(weight, "weight", counts)
        if counts is None:
            y = multiply(a, b, self._shared, self.dtype, bias=bias, fast=True)
        else:
            y = self._multiply_groups(a, b, counts, fast=True)
        return y.reshape(*x.data.shape[:-1], y.shape[-1])

    def input_grad(self, grad: Operand, weight: Operand, counts: Tensor | None = None) -> Tensor:
        """See the base class."""
        a = self._made(grad, "output_grad", counts)
        b = _turned(self._made(weight, "weight", counts, second=True))
        if counts is None:
            dx = multiply(a, b, self._shared, self.dtype)
        else:
            dx = self._multiply_groups(a, b, counts)
        return dx.reshape(*grad.data.shape[:-1], dx.shape[-1])

    def weight_grad(self, grad: Operand, x: Operand, counts: Tensor | None = None) -> Tensor:
        """See the base class."""
        grad_operand = self._made(grad, "output_grad", counts, second=True)
        x_operand = self._made(x, "input", counts, second=True)
        if counts is None:
            return multiply(_turned(grad_operand), _turned(x_operand), self._shared, self.dtype)
        if self._shared == "block":
            a, b = _turned(grad_operand), _turned(x_operand)
            counts = padded_counts(counts, BLOCK, len(grad_operand.data))
        else:
            a, padded = self._tokens_last(grad_operand, counts)
            b, counts = self._tokens_last(x_operand, counts)[0], padded
        return self._multiply_groups(a, b, counts)

    def _multiply_groups(
        self, a: QuantizedData, b: QuantizedData, counts: Tensor, *, fast: bool = False
    ) -> Tensor:
        options = {"fast": fast, "one_by_one": self.one_by_one}
        return multiply_groups(a, b, counts, self._shared, self.dtype, **options)

    def _tokens_last(self, tokens: QuantizedData, counts: Tensor) -> tuple[QuantizedData, Tensor]:
        """Return tokens [t, n] as [n, p] with each expert padded, scales [E, n] or [E, 1], and the
        padded counts.
        """
        data, scales = tokens
        if scales.ndim and self._shared == "tensor":
            scales = _of_experts(scales, counts)
        data, counts = align_experts(data, counts)
        return QuantizedData(data.t(), scales), counts


def _turned(matrix: QuantizedData) -> QuantizedData:
    """Return the transpose of quantized data and scales."""
    data, scales = matrix
    return QuantizedData(
        data.transpose(-2, -1), scales.transpose(-2, -1) if scales.ndim else scales
    )


def _of_experts(scales: Tensor, counts: Tensor) -> Tensor:
    """Return the scales of experts [E, n] from the equal scales of each expert's rows [t, n].

    Without rows, all scales are 1.
    """
    if not len(scales):
        return scales.new_ones(len(counts), scales.shape[1])
    firsts = (counts.cumsum(0) - counts).clamp(max=len(scales) - 1)
    return scales.index_select(0, firsts)
