"""GEMMs of FP8 data by torch's scaled kernels: Y = (A x scales) (B x scales)^T, in fp32 within the
kernel and rounded once.

Both operands are *K-major*: a [M, K] and b [N, K], with the contracted dim last and contiguous,
because Hopper's FP8 units read no other layout. Values per scale, and the shapes of the scales:

    shared    of a                 of b
    tensor    []                   []
    row       [M, 1]               [N, 1]
    block     [M, ceil(K / 128)]   [N, ceil(K / 128)], or of a weight [ceil(N / 128), same]

Kernels read 16 bytes at a time, so K and N are padded to multiples of 16 values, and to full blocks
of 128. The padding is zeros and adds nothing. The result is cut to size.

*Grouped* GEMMs have E experts with sorted tokens t, counted by ``counts`` [E]:

    contracts    of a                            of b
    features     [t, K]   scales [t, 1]          [E, N, K]   scales [E, N, 1]
    tokens       [M, t]   scales [E, M]          [N, t]      scales [E, N]

or blocks within one expert each. torch has a single grouped kernel, for rows and e4m3 on Hopper.
The kernel reads the counts on the GPU. Elsewhere experts are multiplied one by one, and the host
waits for the counts.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning import compat
from megatron_lightning.precision.groups import pad_experts, padded_counts

Shared = Literal["tensor", "row", "block"]

ALIGNMENT = 16
"""Values per read of a kernel."""
BLOCK = 128


class QuantizedData(NamedTuple):
    """Quantized data of matrices, and scales in fp32."""

    data: Tensor
    scales: Tensor


def multiply(
    a: QuantizedData,
    b: QuantizedData,
    shared: Shared,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """Return A B^T + bias, [M, K], [N, K] -> [M, N].

    Args:
        a: Left operand.
        b: Right operand.
        shared: Values with a common scale.
        dtype: Dtype of the result.
        bias: [N].
        fast: Whether Hopper may accumulate with fewer bits. Faster.
    """
    num_rows, size = a.data.shape
    num_columns = b.data.shape[0]
    if not (num_rows and size and num_columns):
        y = a.data.new_zeros((num_rows, num_columns), dtype=dtype)
    elif shared == "block":
        y = torch.ops.megatron_lightning.scaled_mm_of_blocks(*a, *b, dtype)
    else:
        # Inside the kernel if possible: in fp32 for a 16-bit result.
        kernel_bias = None
        if bias is not None and dtype != torch.float32:
            kernel_bias, bias = F.pad(bias.to(dtype), (0, -num_columns % ALIGNMENT)), None
        # Kernels take dims in multiples of ALIGNMENT: zeros are added, and rows of the result cut
        # off.
        y = compat.scaled_mm(
            pad(a.data, 1, ALIGNMENT),
            pad(b.data, ALIGNMENT, ALIGNMENT).t(),
            _row_major(a.scales) if shared == "row" else a.scales,
            pad(b.scales, ALIGNMENT, 1).t() if shared == "row" else b.scales,
            dtype=dtype,
            bias=kernel_bias,
            fast=fast,
        )[:, :num_columns]
    y = y if bias is None else y + bias.to(dtype)
    return y.contiguous()


def pad(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return [..., R, C] contiguous and padded with zeros to multiples of ``rows`` and
    ``columns``.
    """
    below, beside = -x.shape[-2] % rows, -x.shape[-1] % columns
    if below or beside:
        # Quantized data is padded as bytes, because torch cannot pad FP8. The code 0 is the value
        # 0.
        kind = torch.uint8 if x.dtype.itemsize == 1 else x.dtype
        x = F.pad(x.contiguous().view(kind), (0, beside, 0, below)).view(x.dtype)
    return _row_major(x)


def column_major(x: Tensor) -> Tensor:
    """Return [..., R, C] with the rows of a column next to each other in memory."""
    return _row_major(x.transpose(-2, -1)).transpose(-2, -1)


def _row_major(x: Tensor) -> Tensor:
    # Contiguous, also along dims of size 1. Kernels check strides of such dims, and contiguous()
    # keeps odd strides.
    return x.contiguous().view(-1).view(x.shape)


# An operator, since a compiler may change the strides of its results, and the kernel takes the
# scales only in one layout.
@torch.library.custom_op(
    "megatron_lightning::scaled_mm_of_blocks",
    mutates_args=(),
    schema="(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, ScalarType dtype) -> Tensor",
)
def _scaled_mm_of_blocks(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype
) -> Tensor:
    num_rows, num_columns = a.shape[0], b.shape[0]
    square = scale_b.shape[0] != num_columns
    side = BLOCK if square else ALIGNMENT
    a, b = pad(a, ALIGNMENT, BLOCK), pad(b, side, BLOCK)
    # Every row of 4 scales along K starts at a multiple of 16 bytes.
    scale_b = pad(scale_b, 1, 4).t() if square else column_major(pad(scale_b, side, 1))
    scale_a = column_major(pad(scale_a, ALIGNMENT, 1))
    y = compat.scaled_mm_of_blocks(a, b.t(), scale_a, scale_b, dtype=dtype, square=square)
    return y[:num_rows, :num_columns].contiguous()


@_scaled_mm_of_blocks.register_fake
def _(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


# ------------------------------------------------------------------------------------------ grouped


def multiply_groups(
    a: QuantizedData,
    b: QuantizedData,
    counts: Tensor,
    shared: Shared,
    dtype: torch.dtype,
    *,
    fast: bool = False,
    one_by_one: bool = False,
) -> Tensor:
    """Return the GEMM of every expert: [t, K], [E, N, K] -> [t, N], or [M, t], [N, t] ->
    [E, M, N], with zeros for an expert without tokens.

    Scales of tensors and experts ([], [t, 1], [E, 1, 1] and [E, 1]) expand to scales of rows.
    """
    num_experts = len(counts)
    scale_a, scale_b = a.scales, b.scales
    if shared != "block":
        contracts_tokens = b.data.ndim == 2
        of_a = (num_experts, len(a.data)) if contracts_tokens else (len(a.data), 1)
        of_b = (num_experts, len(b.data)) if contracts_tokens else (*b.data.shape[:2], 1)
        scale_a, scale_b = scale_a.expand(of_a), scale_b.expand(of_b)
    y: Tensor = torch.ops.megatron_lightning.scaled_grouped_mm(
        a.data, scale_a, b.data, scale_b, counts, shared, dtype, fast, one_by_one
    )
    return y


def align_experts(x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the data of tokens [t, n] as [p, n] with each expert padded to a multiple of 16, and
    the padded counts.
    """
    padded = pad_experts(x.view(torch.uint8), counts, ALIGNMENT).view(x.dtype)
    return padded, padded_counts(counts, ALIGNMENT, len(padded))


@torch.library.custom_op(
    "megatron_lightning::scaled_grouped_mm",
    mutates_args=(),
    schema="(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, Tensor counts, str shared, "
    "ScalarType dtype, bool fast, bool one_by_one) -> Tensor",
)
def _scaled_grouped_mm(  # noqa: PLR0917 (operators pass by position)
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    counts: Tensor,
    shared: Shared,
    dtype: torch.dtype,
    fast: bool,
    one_by_one: bool,
) -> Tensor:
    left, right = QuantizedData(a, scale_a), QuantizedData(b, scale_b)
    one_by_one = one_by_one or shared == "block" or not a.numel()
    if one_by_one or not compat.takes_scaled_grouped_mm(a, b):
        return _one_by_one(left, right, counts, shared, dtype, fast=fast)
    return _at_once(left, right, counts, fast=fast).to(dtype)


@_scaled_grouped_mm.register_fake
def _(  # noqa: PLR0917 (as above)
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    counts: Tensor,
    shared: Shared,
    dtype: torch.dtype,
    fast: bool,
    one_by_one: bool,
) -> Tensor:
    shape = (a.shape[0], b.shape[-2])
    return a.new_empty(shape if b.ndim == 3 else (counts.shape[0], *shape), dtype=dtype)


def _at_once(a: QuantizedData, b: QuantizedData, counts: Tensor, *, fast: bool) -> Tensor:
    (x, scale_a), (w, scale_b) = a, b
    ends = counts.cumsum(0, dtype=torch.int32)
    num_rows, num_columns = x.shape[0], w.shape[-2]
    if w.ndim == 3:
        scales = _row_major(scale_a).flatten(), pad(scale_b, ALIGNMENT, 1).flatten(1)
        x, w = pad(x, 1, ALIGNMENT), pad(w, ALIGNMENT, ALIGNMENT)
        y = compat.scaled_grouped_mm(x, w.transpose(1, 2), *scales, ends, fast=fast)
        return y[:, :num_columns].contiguous()
    scales = pad(scale_a, 1, ALIGNMENT).flatten(), pad(scale_b, 1, ALIGNMENT).flatten()
    x, w = pad(x, ALIGNMENT, 1), pad(w, ALIGNMENT, 1)
    y = compat.scaled_grouped_mm(x, w.t(), *scales, ends, fast=fast)
    # The kernel may write nothing for an expert with an empty sum.
    return y[:, :num_rows, :num_columns].masked_fill((counts == 0)[:, None, None], 0.0)


def _one_by_one(
    a: QuantizedData,
    b: QuantizedData,
    counts: Tensor,
    shared: Shared,
    dtype: torch.dtype,
    *,
    fast: bool,
) -> Tensor:
    (x, scale_a), (w, scale_b) = a, b
    sizes: list[int] = counts.tolist()
    # Weight gradients contract each expert's tokens. Forward and input gradients keep the tokens as
    # rows.
    contracts_tokens = w.ndim == 2
    lefts = torch.split(x, sizes, dim=1 if contracts_tokens else 0)
    rights = torch.split(w, sizes, dim=1) if contracts_tokens else w.unbind()
    if not contracts_tokens:
        scales_a, scales_b = torch.split(scale_a, sizes), scale_b.unbind()
    elif shared == "block":
        blocks = [size // BLOCK for size in sizes]
        scales_a = torch.split(scale_a, blocks, dim=1)
        scales_b = torch.split(scale_b, blocks, dim=1)
    else:
        scales_a, scales_b = scale_a.unsqueeze(-1).unbind(), scale_b.unsqueeze(-1).unbind()
    results = []
    for left, of_left, right, of_right in zip(lefts, scales_a, rights, scales_b, strict=True):
        scales = of_left, of_right
        if shared == "tensor" and left.numel():
            scales = of_left[0, 0], of_right[0, 0]
        # Copies start at multiples of 16 bytes. Kernels may require the alignment.
        pair = QuantizedData(left, scales[0].clone()), QuantizedData(right, scales[1].clone())
        results.append(multiply(*pair, shared, dtype, fast=fast))
    return torch.stack(results) if contracts_tokens else torch.cat(results)
