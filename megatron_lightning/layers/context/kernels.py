"""Attention of one block on one device, with the log-sum-exp of the scores, forward and backward.

Shapes: queries [b, n, s, d], keys and values [b, g, t, d], log-sum-exps [b, n, s]. The kernels are
the fused kernels behind ``scaled_dot_product_attention``, because the public function hides the
log-sum-exp. Backward takes the *final* output and log-sum-exp of a query, over all blocks of the
query. The gradients of the blocks then add up to the gradients of full attention
(https://arxiv.org/abs/2205.14135, section 3.1 and appendix B.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from megatron_lightning.config.attention_kernels import PIECE
from megatron_lightning.layers.context.blocks import Block

_aten = torch.ops.aten


class Inputs(NamedTuple):
    """Queries, keys and values."""

    q: Tensor
    k: Tensor
    v: Tensor


class Output(NamedTuple):
    """Output [b, n, s, d] and log-sum-exp [b, n, s]."""

    out: Tensor
    log_sum: Tensor


class Kernel(Protocol):
    """Attention kernel for one block."""

    name: str
    """For messages."""

    def forward(self, inputs: Inputs, block: Block, scale: float) -> Output:
        """Return output and log-sum-exp.

        The log-sum-exp is -inf for a query without a visible key.
        """
        ...

    def backward(
        self, grad: Tensor, inputs: Inputs, output: Output, block: Block, scale: float
    ) -> Inputs:
        """Return the block's part of the gradients.

        ``output`` is the final output of the queries.
        """
        ...


class CudaFlash(Kernel):
    """Flash attention of blocks without a mask. Heads of a group use repeated keys."""

    name = "flash attention of CUDA"

    @override
    def forward(self, inputs: Inputs, block: Block, scale: float) -> Output:
        q, k, v = _repeated(inputs)
        out, log_sum, *_ = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, block.mask == "causal", scale=scale
        )
        return Output(out, log_sum)

    @override
    def backward(
        self, grad: Tensor, inputs: Inputs, output: Output, block: Block, scale: float
    ) -> Inputs:
        q, k, v = _repeated(inputs)
        none = torch.zeros(2, dtype=torch.uint64, device=q.device)  # there is no dropout
        grads = _aten._scaled_dot_product_flash_attention_backward(
            grad.contiguous(),
            q,
            k,
            v,
            output.out.contiguous(),
            output.log_sum.float().contiguous(),
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            block.mask == "causal",
            none,
            none[0],
            scale=scale,
        )
        heads = inputs.q.shape[1] // inputs.k.shape[1]
        return Inputs(grads[0], sum_heads(grads[1], heads), sum_heads(grads[2], heads))


def _repeated(inputs: Inputs) -> Inputs:
    q, k, v = inputs
    return Inputs(q, per_query_head(k, q), per_query_head(v, q))


class CpuFlash(Kernel):
    """Flash attention with a mask. Heads of a group share keys."""

    name = "flash attention of the CPU"

    @override
    def forward(self, inputs: Inputs, block: Block, scale: float) -> Output:
        q, k, v = inputs
        mask = _mask(block, q)
        out, log_sum = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, block.mask == "causal", attn_mask=mask, scale=scale
        )
        return Output(out, _without_blind(log_sum, mask))

    @override
    def backward(
        self, grad: Tensor, inputs: Inputs, output: Output, block: Block, scale: float
    ) -> Inputs:
        return Inputs(
            *_aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad,
                *inputs,
                *output,
                0.0,
                block.mask == "causal",
                attn_mask=_mask(block, inputs.q),
                scale=scale,
            )
        )


class MemoryEfficient(Kernel):
    """CUDA's kernel with a mask. Heads of a group use repeated keys."""

    name = "memory-efficient attention of CUDA"

    @override
    def forward(self, inputs: Inputs, block: Block, scale: float) -> Output:
        q, k, v = inputs
        mask, heads = _mask(block, q), q.shape[1] // k.shape[1]
        bias = None if mask is None else mask.expand(q.shape[0], q.shape[1], -1, -1)
        out, log_sum, *_ = _aten._scaled_dot_product_efficient_attention(
            q,
            k.repeat_interleave(heads, 1),
            v.repeat_interleave(heads, 1),
            bias,
            True,
            0.0,
            block.mask == "causal",
            scale=scale,
        )
        return Output(out, _without_blind(log_sum[..., : q.shape[2]], mask))  # padded to 32

    @override
    def backward(
        self, grad: Tensor, inputs: Inputs, output: Output, block: Block, scale: float
    ) -> Inputs:
        q, k, v = inputs
        out, log_sum = output
        mask, heads = _mask(block, q), q.shape[1] // k.shape[1]
        bias = None if mask is None else mask.expand(q.shape[0], q.shape[1], -1, -1)
        padded = torch.nn.functional.pad(log_sum, (0, -log_sum.shape[-1] % 32), value=torch.inf)
        none = torch.zeros((), dtype=torch.int64, device=q.device)  # there is no dropout
        grad_q, grad_k, grad_v, _ = _aten._scaled_dot_product_efficient_attention_backward(
            grad,
            q,
            k.repeat_interleave(heads, 1),
            v.repeat_interleave(heads, 1),
            bias,
            out,
            padded,
            none,
            none,
            0.0,
            [True, True, True, False],
            block.mask == "causal",
            scale=scale,
        )
        return Inputs(grad_q, sum_heads(grad_k, heads), sum_heads(grad_v, heads))


class PlainProducts(Kernel):
    """Matrix products and a softmax, in fp32 for half-precision inputs.

    Only a piece of the queries has scores at a time. Backward recomputes the scores.

    Args:
        softcap: Scores x become softcap tanh(x / softcap) before the mask. None: unchanged.
    """

    name = "matrix products and a softmax"

    def __init__(self, softcap: float | None = None) -> None:
        self._softcap = softcap

    @override
    def forward(self, inputs: Inputs, block: Block, scale: float) -> Output:
        parts = [
            self._forward(_part(inputs, at, to), piece, scale)
            for at, to, piece in _pieces(block, inputs)
        ]
        if len(parts) == 1:
            return parts[0]
        return Output(*(torch.cat(tensors, 2) for tensors in zip(*parts, strict=True)))

    @override
    def backward(
        self, grad: Tensor, inputs: Inputs, output: Output, block: Block, scale: float
    ) -> Inputs:
        score_dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
        grads = Inputs(*(torch.zeros_like(x, dtype=score_dtype) for x in inputs))
        for at, to, piece in _pieces(block, inputs):
            final = Output(output.out[:, :, at], output.log_sum[:, :, at])
            part = _part(inputs, at, to)
            q, k, v = self._backward(grad[:, :, at], part, final, piece, scale)
            grads.q[:, :, at] += q
            grads.k[:, :, to] += k
            grads.v[:, :, to] += v
        return grads

    def _forward(self, inputs: Inputs, block: Block, scale: float) -> Output:
        _, _, v = inputs
        scores, _ = self._scores(inputs, block, scale)
        log_sum = scores.logsumexp(-1)
        finite_sum = log_sum.masked_fill(
            log_sum == -torch.inf, 0.0
        )  # of queries without a visible key
        weights = (scores - finite_sum.unsqueeze(-1)).exp()
        out = weights @ per_query_head(v, inputs.q).to(weights.dtype)
        return Output(out.to(inputs.q.dtype), log_sum)

    def _backward(
        self, grad: Tensor, inputs: Inputs, output: Output, block: Block, scale: float
    ) -> Inputs:
        scores, slope = self._scores(inputs, block, scale, has_slope=True)
        weights = (scores - output.log_sum.to(scores.dtype).unsqueeze(-1)).exp()
        score_dtype = weights.dtype
        q, k, v = (per_query_head(x, inputs.q).to(score_dtype) for x in inputs)
        grad, heads = grad.to(score_dtype), inputs.q.shape[1] // inputs.k.shape[1]
        of_weights = grad @ v.mT - (grad * output.out.to(score_dtype)).sum(-1, keepdim=True)
        of_scores = weights * of_weights * scale
        of_scores = of_scores if slope is None else of_scores.mul_(slope)
        return Inputs(
            of_scores @ k,
            sum_heads(of_scores.mT @ q, heads),
            sum_heads(weights.mT @ grad, heads),
        )

    def _scores(
        self, inputs: Inputs, block: Block, scale: float, *, has_slope: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return scores [b, n, s, t], -inf for invisible keys, and the slope of the cap."""
        q, k, _ = inputs
        score_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        scores = (q.to(score_dtype) * scale) @ per_query_head(k, q).to(score_dtype).mT
        slope = None
        if self._softcap is not None:
            scores.div_(self._softcap).tanh_()
            slope = scores.square().neg_().add_(1.0) if has_slope else None
            scores.mul_(self._softcap)
        if block.mask == "causal":
            block = replace(block, mask="band")
        mask = _mask(block, q)
        return scores if mask is None else scores + mask.to(score_dtype), slope


def _part(inputs: Inputs, queries: slice, keys: slice) -> Inputs:
    return Inputs(inputs.q[:, :, queries], inputs.k[:, :, keys], inputs.v[:, :, keys])


def _pieces(block: Block, inputs: Inputs) -> Iterator[tuple[slice, slice, Block]]:
    """Yield local queries, local keys, and the block of the two."""
    num_queries, num_keys = inputs.q.shape[2], inputs.k.shape[2]
    if num_queries <= PIECE:
        yield slice(None), slice(None), block
        return
    for start in range(0, num_queries, PIECE):
        stop, last = min(start + PIECE, num_queries), num_keys
        if block.mask != "none":  # later keys are visible to none of the queries
            last = max(1, min(num_keys, block.shift + stop))
        at, to = slice(start, stop), slice(0, last)
        piece = replace(block, queries=at, keys=to, shift=block.shift + start)
        yield at, to, piece if block.mask == "none" else replace(piece, mask="band")


class Padded(Kernel):
    """A kernel over heads padded with zeros, since fused kernels of CUDA in half precision take
    heads of a multiple of 8 channels, and values as wide as keys. Zeros change no score.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.name = kernel.name

    @override
    def forward(self, inputs: Inputs, block: Block, scale: float) -> Output:
        found = self._kernel.forward(_padded(inputs), block, scale)
        return Output(found.out[..., : inputs.v.shape[-1]], found.log_sum)

    @override
    def backward(
        self, grad: Tensor, inputs: Inputs, output: Output, block: Block, scale: float
    ) -> Inputs:
        padded = _padded(inputs)
        size = padded.v.shape[-1]
        final = Output(_pad(output.out, size), output.log_sum)
        grads = self._kernel.backward(_pad(grad, size), padded, final, block, scale)
        return Inputs(*(g[..., : x.shape[-1]] for g, x in zip(grads, inputs, strict=True)))


def _padded(inputs: Inputs) -> Inputs:
    """Return half-precision inputs with heads of equal sizes, a multiple of 8."""
    if inputs.q.dtype not in (torch.bfloat16, torch.float16):
        return inputs
    size = max(x.shape[-1] for x in inputs)
    return Inputs(*(_pad(x, size + -size % 8) for x in inputs))


def _pad(x: Tensor, size: int) -> Tensor:
    missing = size - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values with a head for each query head, repeated in groups."""
    heads = q.shape[1] // x.shape[1]
    return x if heads == 1 else x.repeat_interleave(heads, 1)


def sum_heads(grad: Tensor, heads: int) -> Tensor:
    """Sum gradients [b, n, s, d] over the ``heads`` query heads of each group."""
    if heads == 1:
        return grad
    b, n, *sizes = grad.shape
    return grad.view(b, n // heads, heads, *sizes).sum(2)


def _mask(block: Block, q: Tensor) -> Tensor | None:
    """Return the additive mask of a block [s, t], or None without a mask."""
    if block.mask != "band":
        return None
    num_keys = block.keys.stop - block.keys.start
    queries = torch.arange(block.shift, block.shift + q.shape[2], device=q.device)
    back = queries[:, None] - torch.arange(num_keys, device=q.device)
    visible = back >= 0
    if block.window is not None:
        visible &= back <= block.window
    # CUDA's kernels read rows aligned to 16 elements.
    padded = num_keys + -num_keys % 16
    mask = torch.zeros(len(visible), padded, dtype=q.dtype, device=q.device)[:, :num_keys]
    return mask.masked_fill_(~visible, -torch.inf)


def _without_blind(log_sum: Tensor, mask: Tensor | None) -> Tensor:
    """Set the log-sum-exp of queries without a visible key to -inf. Kernels return 0 there."""
    if mask is None:
        return log_sum
    return log_sum.masked_fill((mask == -torch.inf).all(1), -torch.inf)
