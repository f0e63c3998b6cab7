"""The gated delta rule by the kernel of flash-linear-attention, where the package is installed.

The package has Triton kernels for activations in 16 bits. It is never required.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MODULE = "fla.ops.gated_delta_rule"
_HALF = (torch.bfloat16, torch.float16)


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
        """Return what :func:`~megatron_lightning.layers.state_space.delta_rule.delta_rule` returns,
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
    """Return the kernel of flash-linear-attention. None: the package does not load."""
    if not torch.cuda.is_available():
        return None
    try:
        module = importlib.import_module(_MODULE)
    except ImportError:
        return None
    function = getattr(module, "chunk_gated_delta_rule", None)
    return None if function is None else DeltaKernel(function)
