"""Kernels and compilation: 8-bit GEMMs, attention, ``torch.compile``, fused optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

_MAX_GRAPHS = 64
"""Most graphs of blocks with shared code: kinds of layers x training, validation and inference x
static and dynamic shapes x recomputed or not. torch stops at 8, and runs the rest uncompiled."""


def takes_grouped_mm(x: Tensor) -> bool:
    """Return whether ``F.grouped_mm`` takes ``x`` [..., m, n] as an operand: by device, dtype and
    alignment (torch 2.11 to 2.13).

    On GPUs only bf16 has a kernel. For other dtypes ``F.grouped_mm`` loops on GPUs, too.
    """
    if x.device.type == "cuda":
        is_supported = x.dtype is torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (
            8,
            0,
        )
    else:
        is_supported = x.device.type == "cpu" and x.dtype in {
            torch.float32,
            torch.bfloat16,
            torch.float16,
        }
    row, column = x.stride()[-2:]
    pitch_bytes = (row if column == 1 else column if row == 1 else 1) * x.element_size()
    return is_supported and pitch_bytes % 16 == 0 and x.data_ptr() % 16 == 0


def adds_in_fp32(x: Tensor) -> bool:
    """Return whether ``torch.mm`` and ``torch.addmm`` take ``x`` with an fp32 result (torch 2.11 to
    2.13): 16 bits, on a GPU of CUDA. ROCm refuses other dtypes of results.
    """
    is_half = x.dtype in {torch.bfloat16, torch.float16}
    return x.is_cuda and is_half and torch.version.hip is None


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """Multiply FP8 data a [m, k] by b [k, n], column-major, with fp32 scales of tensors ([], [])
    or of rows ([m, 1], [1, n]).

    The private name exists in every torch of 2.11 to 2.13 on CPUs and GPUs, and torch's compiler
    supports the name. ``F.scaled_mm`` follows device by device.
    """
    y: Tensor = torch._scaled_mm(
        a, b, scale_a, scale_b, bias=bias, out_dtype=dtype, use_fast_accum=fast
    )
    return y


def scaled_mm_of_blocks(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, dtype: torch.dtype, square: bool
) -> Tensor:
    """Multiply FP8 data a [m, k] by b [k, n], column-major, with fp32 scales of 128 values along k,
    or, of b, of 128 x 128 (``square``).

    Args:
        a: Left quantized data. k is a multiple of 128.
        b: Right quantized data. n is a multiple of 128 with square blocks.
        scale_a: [m, k / 128], column-major.
        scale_b: [n, k / 128], column-major. With square blocks [k / 128, n / 128], column-major,
            with the first dim padded to a multiple of 4.
        dtype: Dtype of the result.
        square: Whether a scale of b covers 128 x 128 values.
    """
    kinds = F.ScalingType
    of_b = kinds.BlockWise128x128 if square else kinds.BlockWise1x128
    y: Tensor = F.scaled_mm(a, b, scale_a, kinds.BlockWise1x128, scale_b, of_b, output_dtype=dtype)
    return y


def takes_scaled_grouped_mm(a: Tensor, b: Tensor) -> bool:
    """Return whether :func:`scaled_grouped_mm` has a kernel for a and b: e4m3, on Hopper (torch
    2.11 to 2.13).
    """
    is_supported = a.dtype is torch.float8_e4m3fn and b.dtype is torch.float8_e4m3fn
    return (
        is_supported
        and a.device.type == "cuda"
        and torch.cuda.get_device_capability(a.device)[0] == 9
    )


def scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, *, fast: bool = False
) -> Tensor:
    """Multiply e4m3 quantized data of every expert, with fp32 scales of rows. The result is bf16.

    Args:
        a: [t, k], or [m, t].
        b: [E, k, n] or [t, n], column-major.
        scale_a: [t], or [E m] for the rows of each expert in turn.
        scale_b: [E, n], or [E n].
        ends: End of every expert's tokens [E], int32. Multiples of 16 if tokens are contracted.
        fast: Whether Hopper may add up with fewer bits.
    """
    y: Tensor = torch._scaled_grouped_mm(
        a, b, scale_a, scale_b, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return y


def attention_choice(q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float, is_causal: bool) -> int:
    """Return the number, in ``torch.nn.attention.SDPBackend``, of the kernels that
    ``F.scaled_dot_product_attention`` would run now.

    torch 2.11 to 2.13 have no public name for the choice.

    Raises:
        RuntimeError: If no kernel would run. torch warns of the reasons.
    """
    grouped = q.shape[1] != k.shape[1]
    return int(
        torch._fused_sdp_choice(
            q, k, v, dropout_p=dropout_p, is_causal=is_causal, enable_gqa=grouped
        )
    )


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return ``torch.compile(function, **options)`` with a higher limit of graphs.

    torch 2.13 has the limit as an option. Earlier versions read the limit when a call compiles.
    """
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = _MAX_GRAPHS
    run: Callable[..., Any] = torch.compile(function, **options)
    if "recompile_limit" in options:
        return run

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=_MAX_GRAPHS):
            return run(*args, **kwargs)

    return call


def cpp_compilers() -> list[str]:
    """Return the names of the C++ compilers that inductor looks for."""
    from torch._inductor import config

    return [name for name in config.cpp.cxx if name]


def fused_adamw(groups: Sequence[dict[str, Any]], **options: Any) -> torch.optim.AdamW:
    """Return an AdamW that steps all parameters by a single kernel, if torch has the kernel for the
    parameters' device.

    torch marks fused optimizers as able to divide gradients by a loss scale in the step. Lightning
    then leaves the division to the optimizer and refuses to clip gradients. Without the mark
    gradients are unscaled, and clipped, before the step.
    """
    known = {"meta", *torch.utils._foreach_utils._get_fused_kernels_supported_devices()}
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    optimizer = torch.optim.AdamW(groups, fused=True if devices <= known else None, **options)
    optimizer._step_supports_amp_scaling = False
    return optimizer


def never_drop(operator: torch._ops.OpOverload) -> None:
    """Mark ``operator`` as effectful: compilers keep every call of the operator, in order, even
    with an unused result.
    """
    _register_effectful_op(operator, _EffectType.ORDERED)


def avoid_fused_inference(model: nn.Module) -> None:
    """Make torch's encoder layers call their submodules in inference too, instead of a fused
    kernel.

    The kernel would use the weights of sharded linear layers without the collectives of the layers'
    calls.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def operation_counter() -> FlopCounterMode:
    """Return a counter of floating-point operations. Torch leaves out the flash kernel of CPUs."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return FlopCounterMode(display=False, custom_mapping={kernel: _attention_operations})


def _attention_operations(
    query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any
) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]
