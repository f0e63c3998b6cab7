"""The gated delta rule by the kernel of flash-linear-attention, where the package is installed.

The package has Triton kernels for activations in 16 bits. It is never required.

On Hopper, the kernels compiled by Triton 3.4.0 to 3.7.0 have wrong gradients, and the package
refuses backward (https://github.com/fla-org/flash-linear-attention/issues/640), unless it finds
kernels of tilelang. Layers then compute the rule in torch.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

_MODULE = "fla.ops.gated_delta_rule"
_HALF = (torch.bfloat16, torch.float16)
_HOPPER = 9
_FIRST_WRONG, _FIRST_RIGHT = "3.4.0", "3.7.1"
"""Versions of Triton with wrong gradients on Hopper."""


@dataclass(frozen=True)
class DeltaKernel:
    """A fused delta rule."""

    function: Callable[..., Any]
    """``chunk_gated_delta_rule`` of flash-linear-attention."""

    @staticmethod
    def takes(x: Tensor) -> bool:
        """Return whether the kernel computes activations like ``x``."""
        return x.device.type == "cuda" and x.dtype in _HALF

    def __call__(  # noqa: PLR0917 (the arguments of delta_rule)
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        documents: Tensor | None,
    ) -> Tensor:
        """Return outputs of :func:`~megatron_lightning.layers.state_space.delta_rule.delta_rule`,
        without the last state.
        """
        length, size, heads = v.shape[:3]
        repeats = heads // q.shape[2]
        q, k = (t.repeat_interleave(repeats, 2) if repeats > 1 else t for t in (q, k))
        inputs = [t.transpose(0, 1) for t in (q, k, v, log_decay, beta)]
        lengths = None
        if documents is not None:  # the kernel takes documents of a single row
            inputs = [t.flatten(0, 1)[None] for t in inputs]
            lengths = _boundaries(documents.expand(-1, size))
        q, k, v, log_decay, beta = (t.contiguous() for t in inputs)
        out, _ = self.function(
            q=q, k=k, v=v, g=log_decay, beta=beta, scale=1.0, cu_seqlens=lengths,
            use_qk_l2norm_in_kernel=False,
        )  # fmt: skip
        rows: Tensor = out.reshape(size, length, heads, -1)
        return rows.transpose(0, 1)


def _boundaries(documents: Tensor) -> Tensor:
    """Return the boundaries of the documents [s, b] of rows one behind the other."""
    length = len(documents)
    first = torch.ones_like(documents[:1], dtype=torch.bool)
    starts = torch.cat([first, documents[1:] != documents[:-1]])
    first_tokens = starts.t().flatten().nonzero().flatten()
    end = first_tokens.new_tensor([documents.shape[1] * length])
    return torch.cat([first_tokens, end])


def load_kernel() -> DeltaKernel | None:
    """Return the kernel of flash-linear-attention. None: the package does not load, or has no
    gradients on this GPU, which a warning says.
    """
    if not torch.cuda.is_available():
        return None
    try:
        module = importlib.import_module(_MODULE)
    except ImportError:
        return None
    function = getattr(module, "chunk_gated_delta_rule", None)
    if function is None:
        return None
    fault = _fault()
    if fault is not None:
        warnings.warn(
            f"{fault}. Layers of delta nets compute the rule in torch. Install triton 3.7.1 or "
            "above, or tilelang, for kernels of flash-linear-attention. delta_net.kernel=torch "
            "ends the warning.",
            stacklevel=2,
        )
        return None
    return DeltaKernel(function)


def _fault() -> str | None:
    """Return why flash-linear-attention has no gradients on this GPU. None: it has."""
    major, minor = torch.cuda.get_device_capability()
    try:
        triton = TorchVersion(version("triton"))
    except PackageNotFoundError:
        return None
    if major != _HOPPER or not _FIRST_WRONG <= triton < _FIRST_RIGHT or find_spec("tilelang"):
        return None
    return (
        f"triton {triton} compiles wrong gradients of flash-linear-attention for GPUs of compute "
        f"capability {major}.{minor}, and the package refuses them"
    )
