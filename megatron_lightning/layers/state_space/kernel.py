"""The fused scan of the package mamba_ssm, used if the package loads."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.config.mamba import ScanEngine
from megatron_lightning.errors import ConfigError

_MODULE = "mamba_ssm.ops.triton.ssd_combined"


@lru_cache(maxsize=1)  # a failing import is slow, and every call asks
def _fused_scan() -> Callable[..., Tensor] | None:
    """Return the kernel's function, or None if the package does not load."""
    try:
        scan: Callable[..., Tensor] = importlib.import_module(_MODULE).mamba_chunk_scan_combined
    except (ImportError, AttributeError, OSError):  # OSError: of a build for another torch
        return None
    return scan


def uses_kernel(engine: ScanEngine, x: Tensor) -> bool:
    """Return whether the kernel scans inputs such as ``x``.

    Raises:
        ConfigError: If the kernel is required and cannot run.
    """
    if engine == "torch":
        return False
    can = x.is_cuda and not torch.compiler.is_compiling() and _fused_scan() is not None
    if engine == "mamba_ssm" and not can:
        fault = (
            "is not installed, or does not load" if x.is_cuda else f"runs on CUDA, not {x.device}"
        )
        raise ConfigError(
            f"mamba.scan_engine is mamba_ssm, whose kernel {fault}. Install mamba_ssm for CUDA, or "
            "set scan_engine to auto or torch. compile has no graph of the kernel."
        )
    return can


def fused_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    chunk: int,
    documents: Tensor | None = None,
    dtype: torch.dtype,
    scan: Callable[..., Any] | None = None,
) -> Tensor:
    """Return y [s, b, h, p] of full rows by the kernel.

    Args:
        x: As for :func:`chunked_scan`, as all arguments up to ``documents``.
        dt: Step sizes.
        a: Decay rates.
        b: Directions of the inputs.
        c: Directions of the outputs.
        chunk: Tokens of a chunk.
        documents: [s, b or 1] number of each token's document.
        dtype: Dtype of x, B and C in the kernel: the model's.
        scan: The kernel's function. None: of mamba_ssm.

    Raises:
        ConfigError: If the package does not load.
    """
    scan = scan or _fused_scan()
    if scan is None:
        raise ConfigError("the package mamba_ssm does not load. Set mamba.scan_engine to torch.")
    x, b, c = (t.to(dtype).transpose(0, 1).contiguous() for t in (x, b, c))
    rows = None
    if documents is not None:
        rows = documents.expand(-1, len(x)).t().to(torch.int32).contiguous()
    y: Tensor = scan(x, dt.transpose(0, 1).contiguous(), a, b, c, chunk, seq_idx=rows)
    return y.transpose(0, 1).float()
