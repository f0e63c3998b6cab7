"""Attention over several blocks of keys: outputs are merged by the log-sum-exps of their scores,
and gradients summed, in fp32 (fp64 for inputs in fp64).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lightning.config import AttentionBackend
from megatron_lightning.layers.attention.sequence_info import SequenceInfo
from megatron_lightning.layers.context.blocks import Block
from megatron_lightning.layers.context.kernel_choice import kernel_for
from megatron_lightning.layers.context.kernels import Inputs, Output
from megatron_lightning.parallel.grid.context import AxisGroup


@dataclass(frozen=True)
class Sharing:
    """The ranks that share a sequence, and the settings of the attention."""

    group: AxisGroup
    sequence: SequenceInfo
    scale: float
    backend: AttentionBackend = "auto"
    softcap: float | None = None
    """Cap of the scores. None: no cap."""
    sink: Tensor | None = None
    """[n] score of a further key of each head, visible to all queries, with a value of zeros.

    None: there is no such key.
    """


class Merged:
    """Output and log-sum-exp of queries, over the blocks so far.

    Args:
        q: Queries [b, n, s, d].
        sharing: How attention is computed.
    """

    def __init__(self, q: Tensor, sharing: Sharing) -> None:
        self._q = q
        self._scale = sharing.scale
        self._kernel = kernel_for(q.device, sharing.backend, sharing.softcap)
        dtype = wide_dtype(q.dtype)
        self.out = torch.zeros_like(q, dtype=dtype)
        self.log_sum = torch.full(q.shape[:3], -torch.inf, dtype=dtype, device=q.device)
        if sharing.sink is not None:
            self.log_sum.copy_(sharing.sink.to(dtype)[:, None])

    def see(self, keys_and_values: Tensor, visible: Sequence[Block]) -> None:
        """Merge the attention to blocks of keys and values [2, b, g, t, d]."""
        for block in visible:
            rows, at, to = block.rows, block.queries, block.keys
            inputs = Inputs(self._q[rows, :, at], *keys_and_values[:, rows, :, to])
            self.add(block, self._kernel.forward(inputs, block, self._scale))

    def add(self, block: Block, output: Output) -> None:
        """Merge the output of a block for the block's queries."""
        out, log_sum = output
        earlier_sum = self.log_sum[block.rows, :, block.queries]
        block_out = self.out[block.rows, :, block.queries]
        total_sum = torch.logaddexp(earlier_sum, log_sum)
        finite_sum = total_sum.masked_fill(
            total_sum == -torch.inf, 0.0
        )  # so far these queries saw nothing
        block_out *= (earlier_sum - finite_sum).exp().unsqueeze(-1)
        block_out += out * (log_sum - finite_sum).exp().unsqueeze(-1)
        earlier_sum.copy_(total_sum)


class Gradients:
    """Gradient of queries, summed over the blocks so far.

    Args:
        grad: Of the output.
        q: Queries.
        final: Output and log-sum-exp over all blocks.
        sharing: How attention is computed.
    """

    def __init__(self, grad: Tensor, q: Tensor, final: Output, sharing: Sharing) -> None:
        self._grad = grad
        self._q = q
        self._final = final
        self._scale = sharing.scale
        self._kernel = kernel_for(q.device, sharing.backend, sharing.softcap)
        self.q = torch.zeros_like(q, dtype=wide_dtype(q.dtype))

    def of(self, keys_and_values: Tensor, visible: Sequence[Block]) -> Tensor:
        """Return the gradients of keys and values [2, b, g, t, d] from their visible blocks."""
        sums = torch.zeros_like(keys_and_values, dtype=self.q.dtype)
        for block in visible:
            rows, at, to = block.rows, block.queries, block.keys
            inputs = Inputs(self._q[rows, :, at], *keys_and_values[:, rows, :, to])
            final = Output(self._final.out[rows, :, at], self._final.log_sum[rows, :, at])
            grad = self._grad[rows, :, at]
            parts = self._kernel.backward(grad, inputs, final, block, self._scale)
            self.q[rows, :, at] += parts.q
            sums[0, rows, :, to] += parts.k
            sums[1, rows, :, to] += parts.v
        return sums


def sink_gradient(grad: Tensor, final: Output, sink: Tensor) -> Tensor:
    """Return the gradient [n] of the sinks' scores, from the gradient of the output.

    A sink's value is zero, so only the normalization of the other weights depends on the score.
    """
    dtype = final.log_sum.dtype
    products = (grad.to(dtype) * final.out.to(dtype)).sum(-1)
    weights = (sink.to(dtype)[:, None] - final.log_sum).exp()
    return -(weights * products).sum((0, 2)).to(sink.dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of partial results."""
    return torch.float64 if dtype == torch.float64 else torch.float32
