"""Output layer and loss, fused so that the logits of all tokens never exist at once.

The logits of n tokens over a vocabulary of v entries are often the largest tensor of a step. With
the gradient and the softmax's output there are three, all in fp32. Here only a chunk of tokens has
logits at a time:

    forward     Y = X W^T of a chunk. A few numbers a token are kept, and combined over the
                tensor-parallel ranks for all chunks at once (one maximum, one sum)
    backward    Y again, dY of the losses' gradient, dX = dY W, and dW is summed over chunks

Recomputing Y costs a fourth GEMM beside three. Computing the gradient in forward would save the
fourth GEMM, but needs the losses' gradient in forward. The gradient of a scalar loss is known, but
the gradient of token losses depends on the step's masks and weights. If the vocabulary is small
beside the hidden size, the logits weigh little beside the activations of a layer, and are kept:
three GEMMs, and chunks that fit the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_lightning.layers.linear.gemm import Gemm, Operand, SequenceAxis, autocast, rows
from megatron_lightning.layers.linear.splittable import Splittable, linear
from megatron_lightning.layers.losses.loss import CrossEntropy, Targets, Vocabulary
from megatron_lightning.layers.losses.loss_kernels import kernel, loss_gradient, loss_terms
from megatron_lightning.parallel.collectives import (
    all_reduce_start,
    finish,
    keeps_shard,
    reduce_scatter_start,
)

_MOST_KEPT = 8
"""Most logits of a token kept for backward, in units of the hidden size.

A transformer layer keeps 17 to 34 (https://arxiv.org/abs/2205.05198, section 4.1).
"""
_SMALLEST_CHUNK, _SMALL_CHUNK, _FEWEST_CHUNKS = 16, 128, 4


def chunk_tokens(num_tokens: int, hidden_size: int) -> int:
    """Return the tokens of a chunk.

    A chunk has half as many tokens as the hidden size: the logits are then half as large as the
    weight, and a GEMM has enough work for each weight read. A small batch is divided into quarters,
    so that a chunk stays small beside all logits.
    """
    longest = min(
        max(_SMALL_CHUNK, hidden_size // 2),
        max(_SMALLEST_CHUNK, -(-num_tokens // _FEWEST_CHUNKS)),
    )
    num_chunks = max(1, -(-num_tokens // longest))
    return max(1, -(-num_tokens // num_chunks))


@dataclass(frozen=True)
class Head:
    """Settings of an output layer and loss."""

    gemm: Gemm
    vocabulary: Vocabulary
    axis: SequenceAxis | None
    """Ranks and dim of a sharded input. None: the input is full."""
    reduces_input: bool
    """Whether the input's gradient is summed over the ranks here."""
    chunk_tokens: int | None = None
    """Tokens of a chunk. None: see :func:`chunk_tokens`."""
    keep_logits: bool | None = None
    """Whether backward reuses the logits of forward. None: if the vocabulary is small."""
    compiles: bool = False
    """Whether compiled kernels of ``layers.loss_kernels`` read the logits, on a GPU."""

    def chunks(self, x: Tensor) -> list[slice]:
        """Return the chunks of the tokens of ``x`` [n, h]."""
        n = len(x)
        step = self.chunk_tokens or chunk_tokens(n, x.shape[1])
        return [slice(start, min(start + step, n)) for start in range(0, n, step)]

    def keeps(self, hidden_size: int) -> bool:
        """Return whether backward has the logits of forward."""
        if self.keep_logits is None:
            return self.vocabulary.size <= _MOST_KEPT * hidden_size
        return self.keep_logits

    def terms(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the terms of the loss of a chunk's ``logits`` [n, r] for ``ids`` [n]."""
        vocabulary = self.vocabulary
        if vocabulary.entropies is not None or not self._runs_kernel(logits):
            return vocabulary.terms(logits, ids)
        smoothed = bool(vocabulary.label_smoothing)
        options = (smoothed, vocabulary.softcap, vocabulary.temperature)
        return kernel(loss_terms)(logits, ids, *options)

    def logits_grad(
        self, grad: Tensor, logits: Tensor, targets: Targets, own: Tensor, normalizer: Tensor
    ) -> Tensor:
        """Return the gradient of a chunk's logits, like :meth:`Vocabulary.logits_grad`: in fp32, or
        in the dtype of the logits by a compiled kernel.
        """
        vocabulary = self.vocabulary
        if not self._runs_kernel(logits):
            return vocabulary.logits_grad(grad, logits, targets, own, normalizer)
        factors = vocabulary.factors(grad, targets, own, normalizer)
        options = (factors, vocabulary.softcap, vocabulary.temperature)
        return kernel(loss_gradient)(logits, targets.ids, own, *options)

    def _runs_kernel(self, logits: Tensor) -> bool:
        return self.compiles and logits.is_cuda

    def reduce(self, grad: Tensor) -> Tensor:
        """Reduce the gradient of the full input to the gradient of the layer's input."""
        if self.axis is not None:
            return finish(reduce_scatter_start(grad, *self.axis), *self.axis)
        group = self.vocabulary.group
        return finish(all_reduce_start(grad, group), group) if self.reduces_input else grad


class _LinearLoss(torch.autograd.Function):
    """Forward: losses of X W^T + b, chunk by chunk.

    Backward: gradients of the chunks, with the weight gradient summed in fp32.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes by position)
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        keep: bool,
    ) -> Tensor:
        gemm, vocabulary, num_rows = head.gemm, head.vocabulary, weight.shape[0]
        full_input = Operand(x).gather(head.axis).data
        local_targets = vocabulary.targets(targets, num_rows)
        w = gemm.operand(weight, "weight")
        terms, saved_logits, tokens = [], [], rows(full_input)
        # The logits of all tokens would be the largest tensor of the model: a chunk's logits are
        # reduced to a few numbers a token before the next chunk exists.
        for chunk in head.chunks(tokens):
            logits = gemm.forward(gemm.operand(tokens[chunk], "input"), w, bias)
            terms.append(head.terms(logits, local_targets.ids[chunk]))
            if keep:
                saved_logits.append(logits)
            del logits  # free the memory before the next chunk
        local_terms = torch.cat(terms, dim=1)
        # One collective over the vocabulary's ranks for all chunks together.
        losses, normalizer = vocabulary.combine(local_terms, local_targets, num_rows)
        ctx.gathers = head.axis is not None and keeps_shard(x, deferred=False)
        ctx.save_for_backward(
            x if ctx.gathers else full_input,
            weight,
            bias,
            *local_targets,
            local_terms[0],
            normalizer,
            *saved_logits,
        )
        ctx.head = head
        return losses.view(targets.shape)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, weight, bias, ids, elsewhere, ignored, local_sum, normalizer, *saved_logits = (
            ctx.saved_tensors
        )
        head: Head = ctx.head
        gemm, need = head.gemm, ctx.needs_input_grad
        full_input = Operand(x).gather(head.axis).data if ctx.gathers else x
        local_targets, grad, tokens = (
            Targets(ids, elsewhere, ignored),
            grad.flatten(),
            rows(full_input),
        )
        w = gemm.operand(weight, "weight")
        turned = w if gemm.two_sided else gemm.operand(weight, "weight", transposed=True)
        # Chunks again: logits are recomputed unless kept, and gradients are added up or written in
        # place.
        grad_x = torch.empty_like(tokens) if need[0] else None
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        for index, chunk in enumerate(head.chunks(tokens)):
            part = gemm.operand(tokens[chunk], "input")
            logits = saved_logits[index] if saved_logits else gemm.forward(part, w, bias)
            dy = head.logits_grad(
                grad[chunk], logits, local_targets.part(chunk), local_sum[chunk], normalizer[chunk]
            )
            del logits
            if need[2]:
                wide = torch.promote_types(dy.dtype, torch.float32)
                grad_bias = _add(grad_bias, dy.sum(0, dtype=wide))
            dy = dy.to(tokens.dtype)
            operand = gemm.operand(dy, "output_grad")
            if grad_x is not None:
                grad_x[chunk] = gemm.input_grad(operand, turned)
            if need[1]:
                if not gemm.two_sided:
                    part = gemm.operand(tokens[chunk], "input", transposed=True)
                    operand = gemm.operand(dy, "output_grad", transposed=True)
                grad_weight = gemm.add_weight_grad(grad_weight, operand, part)
            # A chunk's memory is free before the next chunk computes.
            del dy, operand
        return (
            None if grad_x is None else head.reduce(grad_x.view(full_input.shape)),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _add(total: Tensor | None, term: Tensor) -> Tensor:
    return term if total is None else total.add_(term)


def linear_losses(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: Head
) -> Tensor:
    """Return the losses [...] in fp32 of the logits x W^T + b for ``targets`` [...].

    Args:
        x: Input [..., h], or a sequence shard if the head has an axis.
        weight: [r, h], this rank's rows of the vocabulary.
        bias: [r].
        targets: Ids of the full vocabulary, for each vector of the full input.
        head: How.
    """
    x, weight = autocast(x, weight, head.gemm, None)
    keep = torch.is_grad_enabled() and head.keeps(x.shape[-1])
    losses: Tensor = _LinearLoss.apply(x, weight, bias, targets, head, keep)  # type: ignore[no-untyped-call]
    return losses


Awaited: TypeAlias = Callable[[nn.Module, Tensor], Tensor | None]
"""Computes the output of an output layer from (layer, input). None: the layer computes the
output."""


class TakesLoss:
    """A layer whose ``forward(x, targets, loss)`` returns losses.

    Without ``targets`` and ``loss``, forward returns logits.
    """

    gemm: Gemm
    compiles_loss: bool = False
    """Whether compiled kernels read the logits of losses, on a GPU."""


class OutputLinear(TakesLoss, Splittable, nn.Linear):
    """An output layer that returns logits or losses. Losses never need all logits at once.

    The weight gradient of losses is computed together with the input's gradient, even under a
    pipeline schedule with deferred weight gradients, because the logits' gradient exists only once.
    """

    def forward(
        self, x: Tensor, targets: Tensor | None = None, loss: CrossEntropy | None = None
    ) -> Tensor:
        """Map x [..., h] to logits [..., v].

        With a loss, map x to losses [...] for ``targets`` [...].
        """
        if targets is None or loss is None:
            return linear(x, self, self.bias)
        vocabulary = loss.vocabulary(self.out_features)
        head = Head(self.gemm, vocabulary, None, False, compiles=self.compiles_loss)
        return linear_losses(x, self.weight, self.bias, targets, head)


def token_losses(x: Tensor, targets: Tensor, layer: nn.Module, loss: nn.Module) -> Tensor:
    """Return the losses [...] of an output layer's logits for ``targets`` [...].

    User modules in place of the model's modules get the usual arguments: the layer gets the input,
    and the loss gets logits and targets. Quantized layers are called likewise, because chunks would
    have separate scales and separate entries in the amax history.
    """
    fused = (
        isinstance(layer, TakesLoss)
        and isinstance(loss, CrossEntropy)
        and layer.gemm.differentiable
    )
    losses: Tensor = layer(x, targets, loss) if fused else loss(layer(x), targets)
    return losses
