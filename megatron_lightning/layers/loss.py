"""Token losses: plain cross entropy, and the vocabulary-parallel one, which never gathers the
logits.

The parallel form follows Megatron-LM (https://arxiv.org/abs/1909.08053, section 3): the maximum,
the sum of exponentials and the target's logit are each reduced over the tensor-parallel ranks. All
arithmetic is fp32; backward keeps the logits in their own dtype and one number a token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_lightning.layers.embedding import local_ids
from megatron_lightning.parallel.collectives import all_reduce
from megatron_lightning.parallel.context import AxisGroup
from megatron_lightning.parallel.spec import shard_range


class CrossEntropy(nn.Module):
    """Per-token cross entropy in fp32; a plan swaps it for the vocabulary-parallel one.

    Args:
        ignore_index: Target whose loss and gradient are zero.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return losses [...] of ``logits`` [..., v] for ``targets`` [...]."""
        losses = F.cross_entropy(
            logits.float().flatten(0, -2),
            targets.flatten(),
            ignore_index=self.ignore_index,
            reduction="none",
        )
        return losses.view(targets.shape)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """log Σexp − target logit forward, with three reduced numbers a token; (softmax − onehot) ·
    grad backward, all local.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, local: Tensor, outside: Tensor, group: AxisGroup
    ) -> Tensor:
        shifted = logits.float()
        maximum = all_reduce(shifted.amax(dim=-1), group, "max")
        # In place from here on: a temporary would be as large as the logits.
        shifted = shifted - maximum[..., None]
        picked = shifted.gather(-1, local[..., None]).squeeze(-1).masked_fill(outside, 0.0)
        picked, total = all_reduce(
            torch.stack((picked, shifted.exp_().sum(dim=-1))), group
        ).unbind()
        log_total = total.log()
        ctx.save_for_backward(logits, local, outside, maximum + log_total)
        return log_total - picked

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, local, outside, normalizer = ctx.saved_tensors
        grad_logits = (logits.float() - normalizer[..., None]).exp_()
        onehot = torch.zeros_like(local, dtype=grad_logits.dtype).masked_fill(~outside, -1.0)
        grad_logits.scatter_add_(-1, local[..., None], onehot[..., None]).mul_(grad[..., None])
        return grad_logits.to(logits.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    group: AxisGroup,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Return the cross entropy of every token in fp32, from logits whose last dim is split over the
    ranks.

    Args:
        logits: [..., v / ranks] this rank's logits.
        targets: [...] ids of the full vocabulary.
        group: The tensor-parallel ranks.
        vocab_size: Size of the full vocabulary, where the last ranks hold less than the others;
            None: all hold the same.
        ignore_index: Target whose loss and gradient are zero.

    Returns:
        [...] losses, equal on every rank.
    """
    start, _ = shard_range(vocab_size or logits.shape[-1] * group.size, group.size, group.rank)
    ignored = targets == ignore_index
    local, outside = local_ids(targets.masked_fill(ignored, start), start, logits.shape[-1], group)
    losses: Tensor = _VocabParallelCrossEntropy.apply(logits, local, outside, group)  # type: ignore[no-untyped-call]
    return losses.masked_fill(ignored, 0.0)


class VocabParallelCrossEntropy(nn.Module):
    """:class:`CrossEntropy` for logits whose last dim is split over the ranks; see
    :func:`vocab_parallel_cross_entropy`.
    """

    def __init__(self, group: AxisGroup, vocab_size: int, ignore_index: int = -100) -> None:
        super().__init__()
        self.group = group
        self.vocab_size = vocab_size
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return losses [...] of this rank's ``logits`` [..., v / ranks] for ``targets`` [...]."""
        return vocab_parallel_cross_entropy(
            logits, targets, self.group, vocab_size=self.vocab_size, ignore_index=self.ignore_index
        )
