"""Attention of one block in plain products over chunks of queries and keys: a reference for other
kernels, on any device and in any dtype.

The softmax runs over the chunks of keys with a running maximum m and sum l, as in
https://arxiv.org/abs/2205.14135, algorithm 1:

    m' = max(m, max_j s_j)    l' = l exp(m - m') + sum_j exp(s_j - m')
    o' = o exp(m - m') + sum_j exp(s_j - m') v_j

The output is o / l, and the log-sum-exp m + log l. Backward takes weights exp(s - lse) of one chunk
at a time. Sums are in fp32, or fp64 for inputs in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor
from typing_extensions import override

from megatron_lightning.config.attention_kernels import CHUNK
from megatron_lightning.layers.context.blocks import Block
from megatron_lightning.layers.context.kernels import (
    Inputs,
    Kernel,
    Output,
    per_query_head,
    sum_heads,
)


class Chunked(Kernel):
    """Plain products and an online softmax.

    Args:
        softcap: Scores x become softcap tanh(x / softcap) before the mask. None: unchanged.
    """

    name = "plain products in chunks"

    def __init__(self, softcap: float | None = None) -> None:
        self._softcap = softcap

    @override
    def forward(self, inputs: Inputs, block: Block, scale: float) -> Output:
        q, k, v = _widened(inputs)
        outputs = []
        for rows in _chunks(q.shape[2]):
            largest = q.new_full((*q.shape[:2], len(rows), 1), -torch.inf)
            total, out = torch.zeros_like(largest), torch.zeros_like(q[:, :, _at(rows)])
            for columns in _chunks(k.shape[2]):
                scores, _ = self._scores(q, k, rows, columns, block, scale)
                new = torch.maximum(largest, scores.amax(-1, keepdim=True))
                finite = new.masked_fill(new == -torch.inf, 0.0)  # these queries saw no key yet
                weights, earlier = (scores - finite).exp(), (largest - finite).exp()
                total = total * earlier + weights.sum(-1, keepdim=True)
                out = out * earlier + weights @ v[:, :, _at(columns)]
                largest = new
            outputs.append(Output(out / total.clamp(min=1e-30), (largest + total.log())[..., 0]))
        out, log_sum = (torch.cat(parts, 2) for parts in zip(*outputs, strict=True))
        return Output(out.to(inputs.q.dtype), log_sum)

    @override
    def backward(
        self, grad: Tensor, inputs: Inputs, output: Output, block: Block, scale: float
    ) -> Inputs:
        q, k, v = _widened(inputs)
        grad, out, log_sum = (x.to(q.dtype) for x in (grad, *output))
        grads = Inputs(*map(torch.zeros_like, (q, k, v)))
        for rows, columns in product(_chunks(q.shape[2]), _chunks(k.shape[2])):
            at, to = _at(rows), _at(columns)
            scores, slope = self._scores(q, k, rows, columns, block, scale)
            weights = (scores - log_sum[:, :, at, None]).exp()
            weights = weights.masked_fill(scores == -torch.inf, 0.0)
            part = grad[:, :, at]
            of_weights = part @ v[:, :, to].mT - (part * out[:, :, at]).sum(-1, keepdim=True)
            of_scores = weights * of_weights * slope * scale
            grads.q[:, :, at] += of_scores @ k[:, :, to]
            grads.k[:, :, to] += of_scores.mT @ q[:, :, at]
            grads.v[:, :, to] += weights.mT @ part
        heads = inputs.q.shape[1] // inputs.k.shape[1]
        return Inputs(grads.q, sum_heads(grads.k, heads), sum_heads(grads.v, heads))

    def _scores(  # noqa: PLR0917 (a chunk of a block)
        self, q: Tensor, k: Tensor, rows: range, columns: range, block: Block, scale: float
    ) -> tuple[Tensor, Tensor | float]:
        """Return scores of a chunk, -inf for invisible keys, and the slope of the cap."""
        scores = q[:, :, _at(rows)] @ k[:, :, _at(columns)].mT * scale
        slope: Tensor | float = 1.0
        if self._softcap is not None:
            bounded = (scores / self._softcap).tanh()
            scores, slope = bounded * self._softcap, 1.0 - bounded.square()
        if block.mask == "none":
            return scores, slope
        queries = torch.tensor(rows, device=q.device)[:, None] + block.shift
        distance = queries - torch.tensor(columns, device=q.device)
        hidden = distance < 0
        if block.window is not None:
            hidden |= distance > block.window
        return scores.masked_fill(hidden, -torch.inf), slope


def _widened(inputs: Inputs) -> Inputs:
    dtype = torch.promote_types(inputs.q.dtype, torch.float32)
    return Inputs(*(per_query_head(x, inputs.q).to(dtype) for x in inputs))


def _chunks(length: int) -> Iterator[range]:
    return (range(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK))


def _at(positions: range) -> slice:
    return slice(positions.start, positions.stop)
